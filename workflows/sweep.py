"""Sweep over variants of one recipe: a complete fine-tune for each point, then a table, a chart and the best recipe.

pyflyte run workflows/sweep.py sweep --recipe recipes/demo-qlora.yaml --grid '{"training.learning_rate": [5e-4, 1e-3, 2e-3]}'

All points finish one stage before the next begins: points that share a task are mapped over it, and failed ones drop out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flytekit import Resources, dynamic, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.recipe import Recipe
from flytune.records import Metrics
from flytune.sweeps import Running, distinct
from images import TRAIN as IMAGE
from tasks.base_model import fetch_base_model
from tasks.evaluate import EVALUATE
from tasks.harness import EVALUATE_TASKS
from tasks.prepare import prepare_data
from tasks.runtime.mapping import map_points
from tasks.runtime.schema import without_schema
from tasks.runtime.sweep_stages import notes, with_data, with_metrics, with_models
from tasks.runtime.volumes import light_pod
from tasks.store import store_artifact
from tasks.sweep import ALL, compare_points, draw_points
from tasks.train import TRAIN

Folders = list[FlyteDirectory | None]


class PrepareOutput(NamedTuple):
    """Folders of the distinct data sets and of the distinct base models."""

    datasets: Folders
    bases: Folders


class TrainOutput(NamedTuple):
    """Runs that were started, and a list of models for each route."""

    running: Running
    models: list[Folders]


class EvaluateOutput(NamedTuple):
    """Runs that were started, and for each shape a list of metrics and a list of answers to the harness's tasks."""

    running: Running
    metrics: list[list[Metrics | None]]
    answers: list[list[FlyteFile | None]]


class StoreOutput(NamedTuple):
    """Runs that were started, and their artifacts."""

    running: Running
    artifacts: Folders


# Runs in the training image: its pod declares the tasks of all shapes, which needs torch.
def _stage(function: Any) -> Any:
    return dynamic(function, container_image=IMAGE, pod_template=light_pod(), requests=Resources(cpu="1", mem="4Gi"))


@without_schema
@_stage
def prepare_points(running: Running) -> PrepareOutput:
    """Prepare the data sets and base models, one for all points that share it."""
    requests, models = distinct([run.request for run in running.runs]), distinct([run.base for run in running.runs])
    scratch = [next(run.scratch_folder for run in running.runs if run.request == request) for request in requests]
    return PrepareOutput(
        _run_shared(running, "data", prepare_data, request=requests, scratch_folder=scratch),
        _run_shared(running, "base", fetch_base_model, base=models),
    )


@without_schema
@_stage
def train_points(running: Running, datasets: Folders, bases: Folders) -> TrainOutput:
    """Train the points; train none if too few are left."""
    going = with_data(running, datasets, bases).stopped_if_too_few()
    groups = {
        route: [
            {
                "recipe": run.recipe,
                "plan": run.plan,
                "dataset": _folder(run.dataset),
                "base": _folder(run.base_files),
                "export_only": False,
                "references": None,
            }
            for run in runs
        ]
        for route, runs in going.by_route().items()
    }
    return TrainOutput(going, _map_groups(going, "train", TRAIN, groups, going.spare))


@without_schema
@_stage
def evaluate_points(running: Running, models: list[Folders], harness_data: FlyteDirectory) -> EvaluateOutput:
    """Evaluate the points on held-out text and the harness's tasks."""
    going = with_models(running, models)
    metrics, answers = {}, {}
    for shape, runs in going.by_shape().items():
        shared = [{"recipe": run.recipe, "trained": _folder(run.trained), "base": _folder(run.base_files)} for run in runs]
        metrics[shape] = [of | {"dataset": _folder(run.dataset)} for run, of in zip(runs, shared, strict=True)]
        given = {"harness_data": harness_data}
        jobs = [of | given | {"job": job} for run, of in zip(runs, shared, strict=True) for job in run.jobs]
        if jobs:
            answers[shape] = jobs
    total = sum(map(len, answers.values()), len(going.runs))
    return EvaluateOutput(
        going,
        _map_groups(going, "evaluate", EVALUATE, metrics, total),
        _map_groups(going, "ask", EVALUATE_TASKS, answers, total),
    )


@without_schema
@_stage
def store_points(
    running: Running, metrics: list[list[Metrics | None]], answers: list[list[FlyteFile | None]], harness_data: FlyteDirectory
) -> StoreOutput:
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
            "harness_data": harness_data,
        }
        for run in going.runs
    ]
    groups = {ALL: elements} if elements else {}
    made = _map_groups(going, "store", {ALL: store_artifact}, groups, len(elements))
    return StoreOutput(going, made[0] if made else [])


@workflow
def sweep(
    recipe: Recipe,
    grid: dict = {},  # type: ignore[type-arg]  # noqa: B006 (Flyte's type for any JSON object; the default is only read)
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
    evaluated = evaluate_points(running=trained.running, models=trained.models, harness_data=drawn.harness_data)
    stored = store_points(
        running=evaluated.running, metrics=evaluated.metrics, answers=evaluated.answers, harness_data=drawn.harness_data
    )
    return compare_points(points=drawn.points, running=stored.running, artifacts=stored.artifacts)


def _map_groups(
    running: Running, stage: str, tasks: Mapping[str, Any], groups: Mapping[str, Sequence[Any]], allowed_failures: int
) -> Any:
    """Map one task for each group over its elements' inputs; groups run in sequence, so that `concurrency` limits all."""
    made: list[Any] = []
    for group, elements in groups.items():
        inputs = {name: [element[name] for element in elements] for name in elements[0]}
        each = map_points(tasks[group], notes(running, stage, group), allowed_failures, running.concurrency)(**inputs)
        made.append(made[-1] >> each if made and running.concurrency else each)
    return made


def _run_shared(running: Running, group: str, task: Any, **inputs: list[Any]) -> Any:
    """Run the task itself, whose cache finetune shares, if all runs share its inputs; else map it over distinct inputs."""
    (count,) = {len(values) for values in inputs.values()}
    if count == 1:
        return [task(**{name: value for name, (value,) in inputs.items()})]
    return map_points(task, notes(running, "prepare", group), count, running.concurrency)(**inputs)


def _folder(address: str) -> FlyteDirectory:
    """Return a task's output folder by its address, without a copy."""
    return FlyteDirectory(address, remote_directory=False)
