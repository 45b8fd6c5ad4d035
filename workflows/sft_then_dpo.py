"""Supervised fine-tuning, then preference tuning of the model that it made, with one lineage. See
docs/objectives.md.

pyflyte run workflows/sft_then_dpo.py sft_then_dpo --recipe SFT_RECIPE --preference DPO_RECIPE
"""

from typing import Any

from tasks.base_model import fetch_base_model
from tasks.merge import MERGE, check_stages, pass_guards
from tasks.plan import make_plan
from workflows.finetune import finetune
from workflows.routing import route_to, workflow


@workflow()
def sft_then_dpo(recipe: Any, preference: Any) -> Any:
    # Preference tuning that does not fit is refused before the first run begins.
    planned = make_plan(recipe=preference)
    checked = check_stages(recipe=recipe, preference=preference, plan=planned.plan)
    supervised = finetune(recipe=checked.recipe)
    shape = pass_guards(recipe=recipe, artifact=supervised)
    base = fetch_base_model(base=planned.base)
    inputs = {"recipe": recipe, "preference": preference, "artifact": supervised, "base": base}
    return finetune(recipe=route_to("merge", shape, MERGE, **inputs))
