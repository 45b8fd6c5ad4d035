"""Supervised fine-tuning, then preference tuning of the model that it made, with one lineage. See
docs/objectives.md.

flyte run --local flyte2/sft_then_dpo.py sft_then_dpo --recipe SFT_RECIPE --preference DPO_RECIPE
"""

from typing import Any

from flyte2 import wiring
from flyte2.driver import workflow
from flyte2.finetune import finetune
from flyte2.stages import call
from flytune.stages.merge import UNMERGED
from flytune.stages.table import BASE_MODEL, CHECK_STAGES, CONTINUE, MERGE, PASS_GUARDS


@workflow
async def sft_then_dpo(recipe: Any, preference: Any) -> Any:
    # Preference tuning that does not fit is refused before the first run begins.
    planned = await wiring.planned(preference)
    checked, _ = await call(CHECK_STAGES)(recipe=recipe, preference=preference, plan=planned["plan"])
    supervised = await finetune(recipe=checked)
    shape = await call(PASS_GUARDS)(recipe=recipe, artifact=supervised)
    base = await call(BASE_MODEL)(base=planned["base"])
    merge = call(CONTINUE) if shape == UNMERGED else call(MERGE, shape)
    continued = await merge(recipe=recipe, preference=preference, artifact=supervised, base=base)
    return await finetune(recipe=continued)
