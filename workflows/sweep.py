"""Sweep over variants of one recipe: a complete fine-tune for each point, then a table, a chart and the best
recipe.

pyflyte run workflows/sweep.py sweep --recipe recipes/demo-qlora.yaml --grid '{"training.learning_rate":
[5e-4, 1e-3, 2e-3]}'

All points finish one phase of the table of stages before the next begins: points that share a task are mapped
over it, and failed ones drop out.
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from flytune.recipe import Recipe
from flytune.stages.table import RUN
from tasks.sweep import compare_points, draw_points
from workflows.sweep_phases import declare

PHASES = declare(RUN, globals())
"""Tasks of the phases of a run, for all points, in their order: `prepare_points`, `train_points`, ..."""


@workflow
def sweep(
    recipe: Recipe,
    grid: dict = {},  # type: ignore[type-arg]  # noqa: B006 (Flyte's type for any JSON object; the default is only read)
    changes: list[dict] = [],  # type: ignore[type-arg]  # noqa: B006
    concurrency: int = 2,
    min_success_ratio: float = 0.5,
    max_points: int = 24,
) -> FlyteDirectory:
    """Fine-tune every combination of `grid` ({dotted field: values}), or every one of `changes` ([{dotted
    field: value}])."""
    drawn = draw_points(
        recipe=recipe,
        grid=grid,
        changes=changes,
        concurrency=concurrency,
        min_success_ratio=min_success_ratio,
        max_points=max_points,
    )
    made = {"running": drawn.running}
    for phase in PHASES:
        found = phase(**made)
        made = {name: getattr(found, name) for name in phase.python_interface.outputs}
    compared: FlyteDirectory = compare_points(points=drawn.points, **made)
    return compared
