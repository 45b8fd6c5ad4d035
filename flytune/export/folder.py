"""The folder of an export: its required files and its tokenizer."""

from pathlib import Path
from typing import Any

from flytune.errors import ExportError
from flytune.models import loading, tokenizers
from flytune.recipe import Recipe


def trained_folder(recipe: Recipe, trained: Path) -> Path:
    """Return the folder of the weights that training wrote or that an artifact has, as the recipe's method
    stores them.

    Raises:
        ExportError: a required file is missing.
    """
    folder = loading.weights_folder(trained)
    config = "config.json" if recipe.method.name == "full" else "adapter_config.json"
    missing = [
        f"{folder.name}/{file}" for file in (config, "tokenizer_config.json") if not (folder / file).is_file()
    ]
    if not list(folder.glob("*.safetensors")):
        missing.append(f"{folder.name}/*.safetensors")
    if missing:
        raise ExportError(
            f"{trained}: not a complete {recipe.method.name} export: no {', '.join(missing)}; train again"
        )
    return folder


def tokenizer(folder: Path) -> Any:
    """Return the tokenizer of an exported folder.

    Raises:
        ExportError: it cannot be read.
    """
    return tokenizers.load(folder, advice="nothing was stored")
