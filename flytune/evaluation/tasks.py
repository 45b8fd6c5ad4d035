"""The evaluation tasks of a recipe, of all kinds: run in parts on base and tuned model, and combined
exactly."""

from importlib import import_module
from pathlib import Path
from typing import Any

from flytune.errors import RecipeError
from flytune.evaluation import guards
from flytune.evaluation.language_models import BothModels, tuned_model
from flytune.evaluation.task_kind import Job, JobResult, TaskKind
from flytune.models import loading, tokenizers
from flytune.recipe import Recipe, TaskSection
from flytune.records import TaskScore


def kind_of(section: type[TaskSection]) -> TaskKind[Any]:
    """Return the kind of a section's tasks."""
    kind: TaskKind[Any] = import_module(f"flytune.evaluation.{section.module}").KIND
    return kind


def kinds(recipe: Recipe) -> list[TaskKind[Any]]:
    """Return the kinds of a recipe's tasks, each once."""
    return [kind_of(section) for section in dict.fromkeys(type(task) for task in recipe.evaluation.tasks)]


def jobs(recipe: Recipe) -> list[Job]:
    """Return the parts of all tasks, one per pod; none if the recipe has no tasks.

    A group is one task here: its model is loaded once, and evaluation.task_shards splits each of its tasks.

    Raises:
        RecipeError: see TaskKind.check.
    """
    for kind in kinds(recipe):
        kind.check(recipe)
    shards = recipe.evaluation.task_shards
    return [
        Job(task=task, shard=shard, shards=shards)
        for task in recipe.evaluation.tasks
        for shard in range(shards)
    ]


def download(recipe: Recipe, folder: Path | None) -> None:
    """Store the data of all tasks, for pods without access to a hub (TaskKind.download).

    Raises:
        RecipeError: a task cannot be loaded; or a guard names a metric that the tasks do not measure.
        DataError: a task needs what the model does not have.
    """
    measured: dict[str, list[str] | None] = {}
    for kind in kinds(recipe):
        measured |= kind.download(recipe, folder)
    if problems := guards.never_measured(recipe, measured):
        raise RecipeError.of(f"recipe {recipe.name}", problems)


def run(recipe: Recipe, trained: Path, job: Job, data: Path | None = None) -> JobResult:
    """Run a part on base and tuned model. An adapter's base is loaded once and run with the adapter switched
    off.

    `data` is the folder that `download` filled.

    Raises:
        RecipeError: the task cannot be loaded.
    """
    loading.import_libraries()
    ask = kind_of(type(job.task)).asked(recipe, job, data)
    folder = str(loading.weights_folder(trained))
    tokenizer = tokenizers.load(folder, trust_remote_code=recipe.model.trust_remote_code)
    models = BothModels(recipe, tuned_model(recipe, trained))
    tuned = ask(models.tuned, tokenizer, "tuned")
    with models.base() as base:
        return JobResult(job=job, base=ask(base, tokenizer, "base"), tuned=tuned)


def combine(recipe: Recipe, results: list[JobResult], out: Path, data: Path | None = None) -> list[TaskScore]:
    """Return the scores over the documents of all parts, and write each kind's own results into `out`.

    `data` is the folder that `download` filled.

    Raises:
        RecipeError: a task cannot be loaded.
    """
    out.mkdir(parents=True, exist_ok=True)
    scores = []
    for kind in kinds(recipe):
        of_kind = [result for result in results if isinstance(result.job.task, kind.section)]
        scores += kind.scores(recipe, of_kind, out, data)
    return scores
