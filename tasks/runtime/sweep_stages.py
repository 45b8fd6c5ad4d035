"""Results of a sweep's map tasks, by which its runs go from one stage to the next."""

from itertools import islice
from typing import Any

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.records import Metrics
from flytune.sweeps import Running, distinct
from tasks.runtime.mapping import failure_reason


def notes(running: Running, stage: str, group: str) -> str:
    """Return the prefix of the addresses to which one map task's elements store the reasons of their failures."""
    return f"{running.notes}/{stage}/{group}"


def with_data(running: Running, datasets: list[FlyteDirectory | None], bases: list[FlyteDirectory | None]) -> Running:
    """Return the runs that have data and base model; runs with equal requests share one of each."""
    requests, models = distinct([run.request for run in running.runs]), distinct([run.base for run in running.runs])
    results: dict[str, dict[str, str] | str] = {}
    for run in running.runs:
        data, model = requests.index(run.request), models.index(run.base)
        found = result_of(running, "prepare", "data", data, datasets[data], "dataset")
        files = result_of(running, "prepare", "base", model, bases[model], "base_files")
        results[run.recipe.name] = found if isinstance(found, str) else files if isinstance(files, str) else found | files
    return running.after(results)


def with_models(running: Running, trained: list[list[FlyteDirectory | None]]) -> Running:
    """Return the trained runs; `trained` has a list for each route."""
    results = {}
    for (route, runs), models in zip(running.by_route().items(), trained, strict=True):
        for index, (run, model) in enumerate(zip(runs, models, strict=True)):
            results[run.recipe.name] = result_of(running, "train", route, index, model, "trained")
    return running.after(results)


def with_metrics(running: Running, metrics: list[list[Metrics | None]], answers: list[list[FlyteFile | None]]) -> Running:
    """Return the runs that were evaluated in all parts.

    Args:
        metrics: a list for each shape.
        answers: a list for each shape that has harness tasks.
    """
    results: dict[str, dict[str, Any] | str] = {}
    parts = iter(answers)
    for (shape, runs), found in zip(running.by_shape().items(), metrics, strict=True):
        files = enumerate(next(parts) if any(run.jobs for run in runs) else [])
        for index, (run, one) in enumerate(zip(runs, found, strict=True)):
            mine = list(islice(files, len(run.jobs)))
            unanswered = [part for part, file in mine if file is None]
            if one is None:
                results[run.recipe.name] = _reason(running, "evaluate", shape, index)
            elif unanswered:
                results[run.recipe.name] = _reason(running, "ask", shape, unanswered[0])
            else:
                addresses = [str(file.remote_source or file.path) for _, file in mine if file]
                results[run.recipe.name] = {"metrics": one, "answers": addresses}
    return running.after(results)


def result_of(
    running: Running, stage: str, group: str, index: int, folder: FlyteDirectory | None, field: str
) -> dict[str, str] | str:
    """Return the field with the folder's address, or the reason why there is none."""
    if folder is None:
        return _reason(running, stage, group, index)
    return {field: str(folder.remote_source or folder.path)}


def _reason(running: Running, stage: str, group: str, index: int) -> str:
    return (
        f"{stage}: {failure_reason(notes(running, stage, group), index) or 'its pod ended without a reason; see the console'}"
    )
