"""The points of a sweep on their way through its stages: what each one has so far, and why others have failed."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field

from flytune.evaluation.harness.run import Job
from flytune.models.base import BaseRequest
from flytune.recipe.recipe import DataRequest, Recipe
from flytune.records.metrics import Metrics
from flytune.records.plan import Plan
from flytune.schema import Strict


class Run(Strict):
    """One point that can run, with the addresses of what its stages have made."""

    recipe: Recipe
    plan: Plan
    route: str
    """The train task's key."""
    shape: str
    """The evaluate task's key."""
    request: DataRequest
    base: BaseRequest
    keep: str
    """The folder that all attempts see."""
    jobs: list[Job] = Field(default=[])
    dataset: str = ""
    base_files: str = ""
    trained: str = ""
    metrics: Metrics | None = None
    answers: list[str] = Field(default=[])
    artifact: str = ""


class Running(Strict):
    """All points that have not failed, and the reasons of those that have."""

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
        """Return what is left once each run, by its recipe's name, has new fields, or a reason why it has failed."""
        runs, reasons = [], dict(self.reasons)
        for run in self.runs:
            result = results[run.recipe.name]
            if isinstance(result, str):
                reasons[run.recipe.name] = result
            else:
                runs.append(run.model_copy(update=dict(result)))
        return self.model_copy(update={"runs": runs, "reasons": reasons})

    def unless_hopeless(self) -> Self:
        """Return itself; where too few are left, without any: nothing more is spent on a sweep that fails."""
        if len(self.runs) >= self.least:
            return self
        words = f"not run: {len(self.runs)} points are left, and {self.least} must succeed (min_success_ratio)"
        return self.after({run.recipe.name: words for run in self.runs})

    def by_route(self) -> dict[str, list[Run]]:
        """Return the runs by their train task, in the order of each one's first run."""
        return _grouped(self.runs, "route")

    def by_shape(self) -> dict[str, list[Run]]:
        """Return the runs by their evaluate task, likewise."""
        return _grouped(self.runs, "shape")

    @property
    def spare(self) -> int:
        """Number of points that may still fail."""
        return max(0, len(self.runs) - self.least)


def distinct(items: Sequence[Strict]) -> list[Any]:
    """Return the items that differ, each where it comes first."""
    return list({item.model_dump_json(): item for item in items}.values())


def _grouped(runs: Sequence[Run], field: str) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(getattr(run, field), []).append(run)
    return groups
