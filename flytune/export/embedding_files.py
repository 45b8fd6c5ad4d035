"""Files by which sentence-transformers, and servers that read them (vLLM, TEI), make an exported embedding
model's vectors: the last token's hidden state, divided by its length, with the recipe's prompts.

Without them a program takes the mean over all tokens, or leaves the division out, and nothing says so.
"""

import json
from pathlib import Path
from typing import Any

from flytune import json_core
from flytune.errors import ExportError
from flytune.recipe import Embed, Recipe

MODULES = "modules.json"
_POOLING = "1_Pooling/config.json"
_MODES = (
    "cls_token",
    "mean_tokens",
    "max_tokens",
    "mean_sqrt_len_tokens",
    "weightedmean_tokens",
    "lasttoken",
)
"""Ways of pooling, of which sentence-transformers' configuration says each by itself."""


def write(recipe: Recipe, config: Any, folder: Path) -> None:
    """Write the files beside the weights of an embedding model; none of another one.

    Args:
        config: the model's configuration.
    """
    for name, content in _contents(recipe, config.get_text_config().hidden_size).items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check(recipe: Recipe, folder: Path) -> None:
    """Compare the files of an exported embedding model with what its recipe says.

    Raises:
        ExportError: one is missing, or says something else.
    """
    if not isinstance(recipe.objective, Embed):
        return
    size = None
    for name, wanted in _contents(recipe, 0).items():
        try:
            content: Any = json_core.load((folder / name).read_bytes())
        except (OSError, json_core.JSONError) as error:
            raise ExportError(
                f"{folder.name}/{name}: missing or damaged ({error}), and without it programs make other "
                "vectors; nothing was stored"
            ) from None
        if name == _POOLING and isinstance(content, dict):
            size = content.pop("word_embedding_dimension", None)
            wanted.pop("word_embedding_dimension")
        if content != wanted:
            raise ExportError(
                f"{folder.name}/{name}: is not what the vectors were trained with: "
                f"{json.dumps(wanted, ensure_ascii=False)[:300]}; nothing was stored"
            )
    if not isinstance(size, int) or size < 1:
        raise ExportError(f"{folder.name}/{_POOLING}: has no word_embedding_dimension; nothing was stored")


def _contents(recipe: Recipe, size: int) -> dict[str, Any]:
    """Return the content of each file; none of another objective.

    Args:
        size: numbers of a vector.
    """
    section = recipe.objective
    if not isinstance(section, Embed):
        return {}
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    pooling = {f"pooling_mode_{mode}": mode == "lasttoken" for mode in _MODES}
    return {
        MODULES: [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for place, (path, kind) in enumerate(kinds.items())
        ],
        _POOLING: {"word_embedding_dimension": size, **pooling, "include_prompt": True},
        "2_Normalize/config.json": {},
        "sentence_bert_config.json": {"max_seq_length": recipe.data.max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": {"query": section.query_prompt, "document": section.document_prompt},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
