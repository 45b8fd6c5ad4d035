"""A planned run, and the state of a sweep's runs between their stages."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field

from flytune.evaluation.task_kind import Job
from flytune.models import BaseRequest
from flytune.recipe import DataRequest, Recipe
from flytune.records import Plan
from flytune.schema import Strict
from flytune.sentences import counted
from flytune.training.reference import ReferenceRequest


class Planned(Strict):
    """Everything that the stages of a run depend on."""

    recipe: Recipe
    plan: Plan
    route: str
    """Key of the train task."""
    shape: str
    """Key of the evaluate task."""
    request: DataRequest
    base: BaseRequest
    """Request of the base model, with its commit."""
    scratch_folder: str
    """Address of scratch data that all attempts share."""
    jobs: list[Job] = Field(default=[])
    """Parts of the harness's tasks."""
    references: list[ReferenceRequest] = Field(default=[])
    """Request of a reference model's log-probabilities; none where a step runs the reference, or needs
    none."""
    reference_shape: str = ""
    """Key of the reference task."""


def first_values(planned: Any, harness_data: Any, export_only: bool = False) -> dict[str, Any]:
    """Return the values that a run begins with, by the names under which its stages take them."""
    values = {name: getattr(planned, name) for name in Planned.model_fields}
    return values | {"harness_data": harness_data, "export_only": export_only}


class Run(Planned):
    """Point of a sweep that can run, with what its stages have made so far."""

    made: dict[str, Any] = Field(default={})
    """Results of its stages, by the names that they have in a run: addresses of files and folders, and
    records."""
    values: str = ""
    """Values that it has of the sweep's fields, in words."""

    def value(self, name: str) -> Any:
        """Return what a stage has made, or a field of the plan."""
        return self.made[name] if name in self.made else getattr(self, name)

    def has(self, name: str) -> bool:
        """Return whether the plan or a stage has given a value of that name."""
        return name in self.made or name in Planned.model_fields


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
        """Return the state with new results of each run, or the reason of its failure, by the recipe's
        name."""
        runs, reasons = [], dict(self.reasons)
        for run in self.runs:
            result = results[run.recipe.name]
            if isinstance(result, str):
                reasons[run.recipe.name] = result
            else:
                runs.append(run.model_copy(update={"made": run.made | dict(result)}))
        return self.model_copy(update={"runs": runs, "reasons": reasons})

    def stopped_if_too_few(self) -> Self:
        """Return the state, without runs if too few are left to succeed, so that a failing sweep costs
        nothing more."""
        if len(self.runs) >= self.least:
            return self
        reason = (
            f"not run: {counted(len(self.runs), 'point is', 'points are')} left, and {self.least} must "
            "succeed (min_success_ratio)"
        )
        return self.after({run.recipe.name: reason for run in self.runs})

    def titles(self, group: Sequence[Run]) -> list[str]:
        """Return the title of each run of a group, for a terminal: `point 2 of 3: lora-2
        (training.learning_rate 0.001)`."""
        places = {run.recipe.name: place for place, run in enumerate(self.runs, 1)}
        return [
            f"point {places[run.recipe.name]} of {len(self.runs)}: {run.recipe.name} ({run.values})"
            for run in group
        ]

    @property
    def spare(self) -> int:
        """Number of points that may still fail."""
        return max(0, len(self.runs) - self.least)
