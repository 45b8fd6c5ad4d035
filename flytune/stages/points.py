"""Stages of a sweep's points: their elements, one for each pod, and the results by which points go to the
next stage."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from flytune.errors import FlytuneError
from flytune.sentences import counted
from flytune.stages.orchestrator import Orchestrator, Stored
from flytune.stages.planned import Run, Running
from flytune.stages.table import Stage

ALL = "all"
"""Name of the one group of a stage that runs in light pods."""


class Element(NamedTuple):
    """Inputs of one pod, and the names of the runs that its result is for."""

    inputs: dict[str, Any]
    runs: list[str]


def elements(stage: Stage, runs: Sequence[Run]) -> dict[str, list[Element]]:
    """Return the elements of a stage by the key of their task; runs with equal inputs share one if the stage
    is cached."""
    groups: dict[str, dict[str, Element]] = {}
    for run in runs:
        for number, inputs in enumerate(_inputs(stage, run)):
            name = key(stage, inputs) if stage.cache else f"{run.recipe.name} {number}"
            group = groups.setdefault(run.value(stage.on) if stage.on else ALL, {})
            group.setdefault(name, Element(inputs, [])).runs.append(run.recipe.name)
    return {group: list(by_name.values()) for group, by_name in groups.items()}


def _inputs(stage: Stage, run: Run) -> list[dict[str, Any]]:
    """Return the inputs of each pod of a run."""
    inputs = {name: run.value(source) for name, source in stage.inputs.items()}
    if not stage.over:
        return [inputs]
    return [inputs | {stage.over: item} for item in inputs[stage.over]]


def key(stage: Stage, inputs: Mapping[str, Any]) -> str:
    """Return the inputs that a cached result follows from, as text."""
    assert stage.cache is not None
    keyed = {name: value for name, value in inputs.items() if name not in stage.cache.ignored}
    return json.dumps(keyed, default=lambda value: value.model_dump(mode="json"), sort_keys=True)


def notes(running: Running, stage: Stage, group: str) -> str:
    """Return the prefix of the addresses to which one map task's elements store the reasons of their
    failures."""
    return f"{running.notes}/{stage.name}/{group}"


def failure_reason(orchestrator: Orchestrator, notes: str, index: int) -> str:
    """Return the reason of an element's failure; empty if it stored none, for example because its pod was
    killed."""
    path = orchestrator.new_folder() / "reason.txt"
    try:
        orchestrator.fetch(f"{notes}-{index}.txt", path)
    except FileNotFoundError:
        return ""
    return path.read_text(encoding="utf-8")


def after(
    orchestrator: Orchestrator,
    running: Running,
    stages: Sequence[Stage],
    results: Mapping[str, Sequence[Sequence[Any]]],
) -> Running:
    """Return the runs for which the stages have succeeded, with what they made, and the reasons of the
    others.

    Args:
        results: by what each stage makes, a list for each group of its elements, with None for those that
            failed.
    """
    succeeded: dict[str, dict[str, Any]] = {run.recipe.name: {} for run in running.runs}
    failed: dict[str, str] = {}
    for stage in stages:
        if stage.over:
            for outputs in succeeded.values():
                outputs[stage.makes] = []
        groups = elements(stage, running.runs).items()
        for (group, group_elements), values in zip(groups, results[stage.makes], strict=True):
            for index, (element, value) in enumerate(zip(group_elements, values, strict=True)):
                reason = _reason(orchestrator, running, stage, group, index) if value is None else None
                for name in element.runs:
                    if reason is not None:
                        failed.setdefault(name, reason)
                    elif stage.over:
                        succeeded[name][stage.makes].append(kept(value))
                    else:
                        succeeded[name][stage.makes] = kept(value)
    return running.after({**succeeded, **failed})


def refuse(failed: int, allowed: int) -> None:
    """Refuse a point's stage after too many failures of others.

    Raises:
        FlytuneError: more have failed than may.
    """
    if failed > allowed:
        raise FlytuneError(
            f"not run: {counted(failed, 'point')} had failed, and {allowed} may (min_success_ratio)"
        )


def kept(value: Any, stored: Any = ()) -> Any:
    """Return a result as it is kept in the state of a sweep: an address, or the content of a record; a list
    of them; `stored` are the face's types of files and folders."""
    if isinstance(value, list):
        return [kept(item, stored) for item in value]
    if isinstance(value, Stored):
        return value.address
    if isinstance(value, stored):
        return value.path
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _reason(orchestrator: Orchestrator, running: Running, stage: Stage, group: str, index: int) -> str:
    reason = failure_reason(orchestrator, notes(running, stage, group), index)
    return f"{stage.name}: {reason or 'its pod ended without a reason; see the console'}"
