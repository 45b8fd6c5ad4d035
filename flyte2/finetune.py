"""Fine-tuning from a recipe to a stored artifact.

flyte run --local flyte2/finetune.py finetune --recipe recipes/demo-qlora.yaml
"""

from typing import Any

from flyte2 import wiring
from flyte2.driver import workflow


@workflow
async def finetune(recipe: Any) -> Any:
    async with wiring.reported(recipe):
        values = await wiring.wire(await wiring.planned(recipe))
    return values["artifact"]
