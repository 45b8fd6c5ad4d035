"""State of a sweep between its stages: the results of each point so far, and the reasons of failed ones."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field

from flytune.evaluation.harness.run import Job
from flytune.models import BaseRequest
from flytune.recipe import DataRequest, Recipe
from flytune.records import Metrics, Plan
from flytune.schema import Strict


class Run(Strict):
    """Point that can run, with the addresses of its stages' results."""

    recipe: Recipe
    plan: Plan
    route: str
    """Key of the train task."""
    shape: str
    """Key of the evaluate task."""
    request: DataRequest
    base: BaseRequest
    scratch_folder: str
    """Address of scratch data that all attempts share."""
    jobs: list[Job] = Field(default=[])
    dataset: str = ""
    base_files: str = ""
    trained: str = ""
    metrics: Metrics | None = None
    answers: list[str] = Field(default=[])
    artifact: str = ""


class Running(Strict):
    """Points that have not failed, and the reasons of those that have."""

    runs: list[Run]
    reasons: dict[str, str] = Field(default={})
    """Reasons of failed points, by the recipe's name."""
    least: int
    """Number of points that must succeed."""
    concurrency: int
    """Number of points that run at a time; 0 for all."""
    notes: str
    """The address below which failed tasks leave their reasons."""

    def after(self, results: Mapping[str, Mapping[str, Any] | str]) -> Self:
        """Return the state with new fields of each run, or the reason of its failure, by the recipe's name."""
        runs, reasons = [], dict(self.reasons)
        for run in self.runs:
            result = results[run.recipe.name]
            if isinstance(result, str):
                reasons[run.recipe.name] = result
            else:
                runs.append(run.model_copy(update=dict(result)))
        return self.model_copy(update={"runs": runs, "reasons": reasons})

    def stopped_if_too_few(self) -> Self:
        """Return the state, without runs if too few are left to succeed, so that a failing sweep costs nothing more."""
        if len(self.runs) >= self.least:
            return self
        reason = f"not run: {len(self.runs)} points are left, and {self.least} must succeed (min_success_ratio)"
        return self.after({run.recipe.name: reason for run in self.runs})

    def by_route(self) -> dict[str, list[Run]]:
        """Return the runs by train task, in the order of each task's first run."""
        return _grouped(self.runs, "route")

    def by_shape(self) -> dict[str, list[Run]]:
        """Return the runs by evaluate task, in the same order."""
        return _grouped(self.runs, "shape")

    @property
    def spare(self) -> int:
        """Number of points that may still fail."""
        return max(0, len(self.runs) - self.least)


def distinct(items: Sequence[Strict]) -> list[Any]:
    """Return the distinct items, each at its first position."""
    return list({item.model_dump_json(): item for item in items}.values())


def _grouped(runs: Sequence[Run], field: str) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(getattr(run, field), []).append(run)
    return groups
