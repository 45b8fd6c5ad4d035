"""Sweep over variants of one recipe: a complete fine-tune for each point, then a table, a chart and the best
recipe.

pyflyte run workflows/sweep.py sweep --recipe recipes/demo-qlora.yaml --grid '{"training.learning_rate":
[5e-4, 1e-3, 2e-3]}'

All points finish one phase of the table of stages before the next begins: points that share a task are mapped
over it, and failed ones drop out.
"""

from typing import Any

from flytune.stages.table import RUN
from tasks.sweep import compare_points, draw_points
from workflows.routing import workflow
from workflows.sweep_phases import declare

PHASES = declare(RUN, globals())
"""Tasks of the phases of a run, for all points, in their order: `prepare_points`, `train_points`, ..."""


@workflow()
def sweep(**asked: Any) -> Any:
    drawn = draw_points(**asked)
    results = {"running": drawn.running}
    for phase in PHASES:
        outputs = phase(**results)
        results = {name: getattr(outputs, name) for name in phase.python_interface.outputs}
    return compare_points(points=drawn.points, **results)
