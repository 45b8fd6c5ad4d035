"""Fine-tuning on data that an upstream task hands on, instead of the recipe's.

flyte run --local flyte2/upstream.py finetune_on_file --recipe RECIPE --data chats.jsonl
"""

from typing import Any

from flyte2.driver import workflow
from flyte2.finetune import finetune
from flyte2.stages import name_dataset, name_file, name_folder


@workflow
async def finetune_on_file(recipe: Any, data: Any) -> Any:
    return await finetune(recipe=await name_file(recipe=recipe, data=data))


@workflow
async def finetune_on_folder(recipe: Any, data: Any) -> Any:
    return await finetune(recipe=await name_folder(recipe=recipe, data=data))


@workflow
async def finetune_on_dataset(recipe: Any, data: Any) -> Any:
    return await finetune(recipe=await name_dataset(recipe=recipe, data=data))
