"""Fine-tuning on data that an upstream workflow hands on, instead of the recipe's.

pyflyte run workflows/upstream.py finetune_on_file --recipe RECIPE --data chats.jsonl
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from flytekit.types.structured import StructuredDataset

from flytune.recipe import Recipe
from tasks.input_data import name_dataset, name_file, name_folder
from workflows.finetune import finetune


@workflow
def finetune_on_file(recipe: Recipe, data: FlyteFile) -> FlyteDirectory:
    """Fine-tune on a file: JSON Lines, JSON, CSV or Parquet."""
    return finetune(recipe=name_file(recipe=recipe, data=data))


@workflow
def finetune_on_folder(recipe: Recipe, data: FlyteDirectory) -> FlyteDirectory:
    """Fine-tune on the files of a folder."""
    return finetune(recipe=name_folder(recipe=recipe, data=data))


@workflow
def finetune_on_dataset(recipe: Recipe, data: StructuredDataset) -> FlyteDirectory:
    """Fine-tune on a structured dataset in Parquet: a data frame of another task."""
    return finetune(recipe=name_dataset(recipe=recipe, data=data))
