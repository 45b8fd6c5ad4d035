"""Fine-tuning from a recipe to a stored artifact.

pyflyte run workflows/finetune.py finetune --recipe recipes/demo-qlora.yaml
"""

from typing import Any

from tasks.plan import make_plan
from tasks.report import report_failure
from workflows.routing import workflow
from workflows.wiring import stages_of, values_of, wire


@workflow(on_failure=report_failure)
def finetune(recipe: Any) -> Any:
    return wire(stages_of(), values_of(make_plan(recipe=recipe)))["artifact"]
