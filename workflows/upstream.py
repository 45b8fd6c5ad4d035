"""Fine-tuning on data that an upstream workflow hands on, instead of the recipe's.

pyflyte run workflows/upstream.py finetune_on_file --recipe RECIPE --data chats.jsonl
"""

from typing import Any

from tasks.input_data import name_dataset, name_file, name_folder
from workflows.finetune import finetune
from workflows.routing import workflow


@workflow()
def finetune_on_file(recipe: Any, data: Any) -> Any:
    return finetune(recipe=name_file(recipe=recipe, data=data))


@workflow()
def finetune_on_folder(recipe: Any, data: Any) -> Any:
    return finetune(recipe=name_folder(recipe=recipe, data=data))


@workflow()
def finetune_on_dataset(recipe: Any, data: Any) -> Any:
    return finetune(recipe=name_dataset(recipe=recipe, data=data))
