"""The interface of a kind of evaluation tasks, the parts that its tasks are run in, and their answers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict

from flytune.recipe import EvaluationTask, Recipe, TaskSection
from flytune.records import TaskScore
from flytune.schema import Record, Strict

SIDES = ("base", "tuned")
Answers = dict[str, list[Any]]
"""Answers of one model, by request."""
Section = TypeVar("Section", bound=TaskSection)


class Job(Strict):
    """One pod's part of a task or group: every `shards`-th document of each task, starting with number
    `shard`."""

    task: EvaluationTask
    shard: int
    shards: int


class JobResult(Record):
    """The answers of both models, by request."""

    model_config = ConfigDict(ser_json_inf_nan="strings")
    job: Job
    base: Answers
    tuned: Answers


class TaskKind(Generic[Section]):
    """One kind of tasks. A pod asks both models and stores their answers; the scores are of all parts
    together."""

    section: type[Section]
    """Section of its tasks in a recipe."""

    def tasks(self, recipe: Recipe) -> list[Section]:
        """List the recipe's tasks of this kind."""
        return [task for task in recipe.evaluation.tasks if isinstance(task, self.section)]

    def check(self, recipe: Recipe) -> None:
        """Look up the recipe's tasks of this kind, without reading data or contacting a hub.

        Raises:
            RecipeError: it is not installed; or all mistakes at once.
        """

    def download(self, recipe: Recipe, folder: Path | None) -> Mapping[str, list[str] | None]:
        """Load each task, and store its data in `folder`, or in this machine's own cache if `folder` is None.

        Returns:
            The metrics of each task and group; None for a task whose metrics are only known after it has run.

        Raises:
            RecipeError, DataError: a task cannot be loaded.
        """
        raise NotImplementedError

    def asked(self, recipe: Recipe, job: Job, data: Path | None) -> Callable[[Any, Any, str], Answers]:
        """Load the task of a part; return what asks a model, given the model, its tokenizer and its side.

        Args:
            data: the folder that `download` has filled; None for this machine's own cache.

        Raises:
            RecipeError: the task cannot be loaded.
        """
        raise NotImplementedError

    def scores(
        self, recipe: Recipe, results: list[JobResult], out: Path, data: Path | None
    ) -> list[TaskScore]:
        """Return the scores over the documents of all parts, and write what the artifact has of them into
        `out`.

        Raises:
            RecipeError: a task cannot be loaded.
        """
        raise NotImplementedError
