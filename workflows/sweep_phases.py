"""Phases of a sweep as dynamic tasks, each of which maps the tasks of its stages over the points that have
not failed."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from flytekit import dynamic

import images
from flytune.stages import points
from flytune.stages.planned import Running
from flytune.stages.points import Element
from flytune.stages.table import Phase, Resources, Stage
from flytune.stages.value_types import as_function, hints_of, named_tuple
from tasks.run import TASKS
from tasks.runtime import pods, values
from tasks.runtime.dynamic import without_laptop
from tasks.runtime.mapping import map_points
from tasks.runtime.orchestrator import FLYTE
from tasks.runtime.schema import without_schema

_PARAMETER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def declare(phases: Sequence[Phase], module: dict[str, Any]) -> list[Any]:
    """Declare a dynamic task for each phase in a module; return them in the phases' order.

    A phase whose stages wait for each other continues in another one, unless the first have nothing to do.
    """
    declared, before = [], list[Stage]()
    for phase in phases:
        waves, then = phase.waves, None
        fields = [("running", Running), *((stage.makes, _results(stage)) for stage in waves[-1])]
        output = named_tuple(f"{phase.name.title()}Output", fields)
        for at in reversed(range(len(waves))):
            earlier = before if at == 0 else waves[at - 1]
            name = f"{phase.name}_points" + (f"_after_{earlier[-1].name}" if at else "")
            then = _declared(name, earlier, waves[at], then, output, module)
        declared.append(then)
        before = waves[-1]
    return declared


def _declared(
    name: str,
    earlier: Sequence[Stage],
    stages: Sequence[Stage],
    then: Any,
    output: Any,
    module: dict[str, Any],
) -> Any:
    """Declare the dynamic task that maps `stages` after `earlier` ones; `then` is that of the next stages of
    the phase."""

    def run(running: Running, **results: Any) -> Any:
        given = {stage.makes: values.TYPES.to_stage(results[stage.makes], _lists(stage)) for stage in earlier}
        going = points.after(FLYTE, running, earlier, given)
        if any(stage.is_costly for stage in stages):
            going = going.stopped_if_too_few()
        if then is not None and not any(points.elements(stage, going.runs) for stage in stages):
            # In this pod: another one would take a minute to begin.
            return then.task_function(running=going, **{stage.makes: [] for stage in stages})
        mapped = {stage.makes: _map(going, stage) for stage in stages}
        return output(going, **mapped) if then is None else then(running=going, **mapped)

    inputs = {"running": Running} | {stage.makes: _results(stage) for stage in earlier}
    parameters = [inspect.Parameter(name, _PARAMETER, annotation=kind) for name, kind in inputs.items()]
    signature = inspect.Signature(parameters, return_annotation=output)
    function = as_function(run, _declared, module["__name__"], name, signature)
    # Its pod registers the tasks of all shapes: it needs torch, so runs in the training image, and the names
    # of the images.
    pod = pods.light(Resources(1, 4), images.environment)
    declared = dynamic(container_image=images.TRAIN, **pod)(function)
    module[name] = without_schema(without_laptop(declared))
    return module[name]


def _lists(stage: Stage) -> Any:
    """Return the type of a stage's results: a list for each group of points, with None for each that
    failed."""
    hint: Any = hints_of(stage.load())["return"] | None
    return list[list[hint]]


def _results(stage: Stage) -> Any:
    """Return Flyte's type of a stage's results."""
    return values.TYPES.type_of(_lists(stage))


def _map(running: Running, stage: Stage) -> list[Any]:
    """Map a stage's tasks over its elements; groups run in sequence, so that `concurrency` limits all."""
    nodes: list[Any] = []
    groups = points.elements(stage, running.runs)
    total = sum(map(len, groups.values()))
    allowed = running.spare if stage.is_costly else total
    for group, elements in groups.items():
        task = TASKS[stage.name][group] if stage.on else TASKS[stage.name]
        each = _map_group(running, stage, task, points.notes(running, stage, group), elements, allowed)
        nodes.append(
            nodes[-1] >> each if nodes and running.concurrency and not isinstance(nodes[-1], list) else each
        )
    return nodes


def _map_group(
    running: Running, stage: Stage, task: Any, notes: str, elements: list[Element], allowed: int
) -> Any:
    inputs = [_constants(stage, element.inputs) for element in elements]
    if stage.cache and len(elements) == 1 and len(elements[0].runs) == len(running.runs):
        # The task itself, whose cache finetune shares.
        return [task(**inputs[0])]
    has_titles = stage.on and not stage.over
    runs = [
        run for element in elements for run in running.runs if has_titles and run.recipe.name in element.runs
    ]
    titles = [f"{stage.name}, {title}" for title in running.titles(runs)]
    lists = {name: [point[name] for point in inputs] for name in inputs[0]}
    return map_points(task, notes, allowed, running.concurrency, titles)(**lists)


def _constants(stage: Stage, inputs: Mapping[str, Any]) -> dict[str, Any]:
    kinds = hints_of(stage.load())
    return {name: values.constant(value, kinds[name]) for name, value in inputs.items()}
