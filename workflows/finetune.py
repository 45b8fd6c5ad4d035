"""Fine-tuning from a recipe to a stored artifact.

pyflyte run workflows/finetune.py finetune --recipe recipes/demo-qlora.yaml
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from flytune.recipe import Recipe
from tasks.plan import make_plan
from tasks.report import report_failure
from workflows.wiring import stages_of, values_of, wire


@workflow(on_failure=report_failure)
def finetune(recipe: Recipe) -> FlyteDirectory:
    """Plan, prepare the data, train on the plan's machines, evaluate the export, store one artifact."""
    planned = make_plan(recipe=recipe)
    artifact: FlyteDirectory = wire(stages_of(), values_of(planned))["artifact"]
    return artifact
