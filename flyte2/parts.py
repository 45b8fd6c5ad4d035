"""Parts of finetune as tasks of their own.

flyte run --local flyte2/parts.py plan_only --recipe recipes/demo-qlora.yaml
"""

from typing import Any

from flyte2 import wiring
from flyte2.driver import workflow
from flyte2.stages import call
from flytune.stages.table import CHECKPOINT, COMBINE, PREPARE


@workflow
async def plan_only(recipe: Any) -> Any:
    return (await wiring.planned(recipe))["plan"]


@workflow
async def prepare_only(recipe: Any) -> Any:
    return await call(PREPARE)(**PREPARE.taken(await wiring.planned(recipe)))


@workflow
async def evaluate_only(recipe: Any, artifact: Any) -> Any:
    values = await wiring.wire(await wiring.planned(recipe), "prepare")
    values = await wiring.wire(values | {"trained": artifact}, "evaluate")
    return await call(COMBINE)(
        **{name: values[name] for name in ("recipe", "metrics", "answers", "harness_data")}
    )


@workflow
async def resume(recipe: Any) -> Any:
    return await _from_checkpoint(recipe, is_export_only=False)


@workflow
async def export_only(recipe: Any) -> Any:
    return await _from_checkpoint(recipe, is_export_only=True)


async def _from_checkpoint(recipe: Any, is_export_only: bool) -> Any:
    async with wiring.reported(recipe):
        values = await wiring.wire(await wiring.planned(recipe, is_export_only), "prepare")
        checked = await call(CHECKPOINT)(recipe=recipe, dataset=values["dataset"])
        values = await wiring.wire(values | {"recipe": checked}, "train", "evaluate", "store")
    return values["artifact"]
