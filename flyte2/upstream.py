"""Fine-tuning on data that an upstream task hands on, instead of the recipe's.

flyte run --local flyte2/upstream.py finetune_on_file --recipe RECIPE --data chats.jsonl
"""

from flyte.io import DataFrame, Dir, File

from flyte2.driver import driver
from flyte2.finetune import finetune
from flyte2.stages import name_dataset, name_file, name_folder
from flytune.recipe import Recipe


@driver.task
async def finetune_on_file(recipe: Recipe, data: File) -> Dir:
    """Fine-tune on a file: JSON Lines, JSON, CSV or Parquet."""
    return await finetune(recipe=await name_file(recipe=recipe, data=data))


@driver.task
async def finetune_on_folder(recipe: Recipe, data: Dir) -> Dir:
    """Fine-tune on the files of a folder."""
    return await finetune(recipe=await name_folder(recipe=recipe, data=data))


@driver.task
async def finetune_on_dataset(recipe: Recipe, data: DataFrame) -> Dir:
    """Fine-tune on a data frame in Parquet of another task."""
    return await finetune(recipe=await name_dataset(recipe=recipe, data=data))
