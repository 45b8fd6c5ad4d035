"""One recipe in many variants: each point a whole fine-tune, then a table, a picture, and the best one's recipe.

pyflyte run workflows/sweep.py sweep --recipe recipes/demo-qlora.yaml --grid '{"training.learning_rate": [5e-4, 1e-3, 2e-3]}'

All points go through one stage before the next: those that share a task are mapped over it, and who fails is not in the next.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from flytekit import Resources, dynamic, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.recipe.recipe import Recipe
from flytune.records.metrics import Metrics
from flytune.sweeps.points import Running, distinct
from images import TRAIN as IMAGE
from tasks.base_model import fetch_base_model
from tasks.evaluate import EVALUATE
from tasks.harness import EVALUATE_TASKS
from tasks.prepare import prepare_data
from tasks.runtime.mapping import mapped
from tasks.runtime.schema import trimmed
from tasks.store import store_artifact
from tasks.sweep import ALL, compare_points, draw_points, notes, with_data, with_metrics, with_models
from tasks.train import TRAIN

Folders = list[FlyteDirectory | None]


class Prepared(NamedTuple):
    """Folders of each different data section, and of each different base model."""

    datasets: Folders
    bases: Folders


class Trained(NamedTuple):
    """The runs that were begun, and a list of models for each route."""

    running: Running
    models: list[Folders]


class Evaluated(NamedTuple):
    """The runs that were begun, and for each shape a list of metrics, and one of answers to the harness's tasks."""

    running: Running
    metrics: list[list[Metrics | None]]
    answers: list[list[FlyteFile | None]]


class Stored(NamedTuple):
    """The runs that were begun, and their artifacts."""

    running: Running
    artifacts: Folders


# In the image that trains: its pod declares the tasks of all shapes, which asks for torch.
_stage = partial(dynamic, container_image=IMAGE, requests=Resources(cpu="1", mem="4Gi"))


@trimmed
@_stage
def prepare_points(running: Running) -> Prepared:
    """Make once what several points share."""
    requests, models = distinct([run.request for run in running.runs]), distinct([run.base for run in running.runs])
    keep = [next(run.scratch_folder for run in running.runs if run.request == request) for request in requests]
    return Prepared(
        _shared(running, "data", prepare_data, request=requests, keep=keep),
        _shared(running, "base", fetch_base_model, base=models),
    )


@trimmed
@_stage
def train_points(running: Running, datasets: Folders, bases: Folders) -> Trained:
    """Train the points; none, where too few are left."""
    going = with_data(running, datasets, bases).stopped_if_too_few()
    groups = {
        route: [
            {
                "recipe": run.recipe,
                "plan": run.plan,
                "dataset": _folder(run.dataset),
                "base": _folder(run.base_files),
                "further": True,
            }
            for run in runs
        ]
        for route, runs in going.by_route().items()
    }
    return Trained(going, _mapped(going, "train", TRAIN, groups, going.spare))


@trimmed
@_stage
def evaluate_points(running: Running, models: list[Folders], data: FlyteDirectory) -> Evaluated:
    """Evaluate the points on held-out text and the harness's tasks."""
    going = with_models(running, models)
    metrics, answers = {}, {}
    for shape, runs in going.by_shape().items():
        shared = [{"recipe": run.recipe, "trained": _folder(run.trained), "base": _folder(run.base_files)} for run in runs]
        metrics[shape] = [of | {"dataset": _folder(run.dataset)} for run, of in zip(runs, shared, strict=True)]
        asked = [of | {"job": job, "data": data} for run, of in zip(runs, shared, strict=True) for job in run.jobs]
        if asked:
            answers[shape] = asked
    most = sum(map(len, answers.values()), len(going.runs))
    return Evaluated(
        going,
        _mapped(going, "evaluate", EVALUATE, metrics, most),
        _mapped(going, "ask", EVALUATE_TASKS, answers, most),
    )


@trimmed
@_stage
def store_points(
    running: Running, metrics: list[list[Metrics | None]], answers: list[list[FlyteFile | None]], data: FlyteDirectory
) -> Stored:
    """Store an artifact of each point that was evaluated."""
    going = with_metrics(running, metrics, answers)
    elements = [
        {
            "recipe": run.recipe,
            "plan": run.plan,
            "dataset": _folder(run.dataset),
            "trained": _folder(run.trained),
            "metrics": run.metrics,
            "answers": [FlyteFile(address, remote_path=False) for address in run.answers],
            "data": data,
        }
        for run in going.runs
    ]
    groups = {ALL: elements} if elements else {}
    made = _mapped(going, "store", {ALL: store_artifact}, groups, len(elements))
    return Stored(going, made[0] if made else [])


@workflow
def sweep(
    recipe: Recipe,
    grid: dict = {},  # type: ignore[type-arg]  # noqa: B006 (Flyte's word for any JSON object; the default is only read)
    changes: list[dict] = [],  # type: ignore[type-arg]  # noqa: B006
    concurrency: int = 2,
    min_success_ratio: float = 0.5,
    max_points: int = 24,
) -> FlyteDirectory:
    """Fine-tune every combination of `grid` ({dotted field: values}), or every one of `changes` ([{dotted field: value}])."""
    drawn = draw_points(
        recipe=recipe,
        grid=grid,
        changes=changes,
        concurrency=concurrency,
        min_success_ratio=min_success_ratio,
        max_points=max_points,
    )
    prepared = prepare_points(running=drawn.running)
    trained = train_points(running=drawn.running, datasets=prepared.datasets, bases=prepared.bases)
    evaluated = evaluate_points(running=trained.running, models=trained.models, data=drawn.data)
    stored = store_points(running=evaluated.running, metrics=evaluated.metrics, answers=evaluated.answers, data=drawn.data)
    return compare_points(points=drawn.points, running=stored.running, artifacts=stored.artifacts)


def _mapped(running: Running, stage: str, tasks: Mapping[str, Any], groups: Mapping[str, Sequence[Any]], spare: int) -> Any:
    """Map a task for each group over its elements' inputs; one after the other, so that `concurrency` is that of all."""
    made: list[Any] = []
    for group, elements in groups.items():
        inputs = {name: [element[name] for element in elements] for name in elements[0]}
        each = mapped(tasks[group], notes(running, stage, group), spare, running.concurrency)(**inputs)
        made.append(made[-1] >> each if made and running.concurrency else each)
    return made


def _shared(running: Running, group: str, task: Any, **inputs: list[Any]) -> Any:
    """Run what all runs share as the task itself, whose cache finetune has too; else as a map task over what differs."""
    (count,) = {len(values) for values in inputs.values()}
    if count == 1:
        return [task(**{name: value for name, (value,) in inputs.items()})]
    return mapped(task, notes(running, "prepare", group), count, running.concurrency)(**inputs)


def _folder(address: str) -> FlyteDirectory:
    """Return the folder that a task has made, where it is."""
    return FlyteDirectory(address, remote_directory=False)
