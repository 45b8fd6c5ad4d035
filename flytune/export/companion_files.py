"""Files beside the weights by which other programs know what a model's answers are (Head.companions)."""

import json
from pathlib import Path
from typing import Any

from flytune import json_core
from flytune.errors import ExportError
from flytune.models import heads
from flytune.recipe import Recipe

_SIZE = "word_embedding_dimension"
"""Key of the numbers of a vector, which the recipe does not say."""


def write(recipe: Recipe, config: Any, folder: Path) -> None:
    """Write the files into the folder of the weights.

    Args:
        config: the model's configuration.
    """
    size = config.get_text_config().hidden_size
    for name, content in heads.head_of(recipe).companions(recipe, size).items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check(recipe: Recipe, folder: Path) -> None:
    """Compare the files with what the recipe says.

    Raises:
        ExportError: one is missing, or says something else.
    """
    for name, wanted in heads.head_of(recipe).companions(recipe, 0).items():
        where = f"{folder.name}/{name}"
        try:
            content: Any = json_core.load((folder / name).read_bytes())
        except (OSError, json_core.JSONError) as error:
            raise ExportError(
                f"{where}: missing or damaged ({error}), and without it programs make other vectors; nothing "
                "was stored"
            ) from None
        if _SIZE in wanted and isinstance(content, dict) and type(content.get(_SIZE)) is int:
            wanted = wanted | {_SIZE: content[_SIZE]}
        if content != wanted:
            raise ExportError(
                f"{where}: is not what the vectors were trained with: "
                f"{json.dumps(wanted, ensure_ascii=False)[:300]}; nothing was stored"
            )
