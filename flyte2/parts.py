"""Parts of finetune as tasks of their own.

flyte run --local flyte2/parts.py plan_only --recipe recipes/demo-qlora.yaml
"""

from flyte.io import Dir

from flyte2 import wiring
from flyte2.driver import driver
from flyte2.stages import call
from flytune.recipe import Recipe
from flytune.records import Metrics, Plan
from flytune.stages.table import CHECKPOINT, COMBINE, PREPARE


@driver.task
async def plan_only(recipe: Recipe) -> Plan:
    """Plan the recipe: whether it fits, on which shape, why, and at what cost; no GPU is requested."""
    plan: Plan = (await wiring.planned(recipe))["plan"]
    return plan


@driver.task
async def prepare_only(recipe: Recipe) -> Dir:
    """Prepare the data set; a later finetune with the same data, tokenizer and data section takes it from the
    cache."""
    values = await wiring.planned(recipe)
    dataset: Dir = await call(PREPARE)(request=values["request"], scratch_folder=values["scratch_folder"])
    return dataset


@driver.task
async def evaluate_only(recipe: Recipe, artifact: Dir) -> Metrics:
    """Compare a stored artifact with its base model again, on the recipe's held-out data as it is now."""
    values = await wiring.wire(await wiring.planned(recipe), "prepare")
    made = await wiring.wire(values | {"trained": artifact}, "evaluate")
    metrics: Metrics = await call(COMBINE)(
        **{name: made[name] for name in ("recipe", "metrics", "answers", "harness_data")}
    )
    return metrics


@driver.task
async def resume(recipe: Recipe) -> Dir:
    """Resume from the run's newest complete checkpoint; fail if there is none."""
    return await _from_checkpoint(recipe, is_export_only=False)


@driver.task
async def export_only(recipe: Recipe) -> Dir:
    """Export, evaluate and store the run's newest complete checkpoint without further training; keep the
    checkpoint."""
    return await _from_checkpoint(recipe, is_export_only=True)


async def _from_checkpoint(recipe: Recipe, is_export_only: bool) -> Dir:
    async with wiring.reported(recipe):
        values = await wiring.wire(await wiring.planned(recipe, is_export_only), "prepare")
        found = await call(CHECKPOINT)(recipe=recipe, dataset=values["dataset"])
        made = await wiring.wire(values | {"recipe": found}, "train", "evaluate", "store")
    artifact: Dir = made["artifact"]
    return artifact
