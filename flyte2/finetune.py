"""Fine-tuning from a recipe to a stored artifact.

flyte run --local flyte2/finetune.py finetune --recipe recipes/demo-qlora.yaml
"""

from flyte.io import Dir

from flyte2 import wiring
from flyte2.driver import driver
from flytune.recipe import Recipe


@driver.task
async def finetune(recipe: Recipe) -> Dir:
    """Plan, prepare the data, train on the plan's machines, evaluate the export, store one artifact."""
    async with wiring.reported(recipe):
        made = await wiring.wire(await wiring.planned(recipe))
    artifact: Dir = made["artifact"]
    return artifact
