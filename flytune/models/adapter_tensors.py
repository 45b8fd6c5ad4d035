"""Adapters put into a model, with every tensor of their file, and no other.

PEFT builds the layers that adapter_config.json names, and leaves out the file's tensors of other layers
without a word. A base with a part of an adapter is not a model that anyone has trained.
"""

import re
import warnings
from pathlib import Path
from typing import Any

from flytune.models.adapter_config import CONFIG
from flytune.sentences import counted

WEIGHTS = "adapter_model.safetensors"
_CAUSES = "target_modules, exclude_modules, layers_to_transform, modules_to_save, use_dora"


def put(model: Any, folder: Path, name: str = "default") -> Any:
    """Return a base model, or one with other adapters, with the adapter of a folder, under a name.

    Raises:
        ValueError: the file's tensors are not those of the layers that adapter_config.json names.
    """
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Found missing adapter keys")
        if isinstance(model, PeftModel):
            model.load_adapter(str(folder), adapter_name=name)
        else:
            model = PeftModel.from_pretrained(model, str(folder), adapter_name=name)
    check(model, folder, name)
    return model


def check(model: Any, folder: Path, name: str) -> None:
    """Compare the tensors of an adapter's file with its parameters in a model.

    Raises:
        ValueError: some have no place in the model, or some of the model are in no file.
    """
    from safetensors import safe_open

    with safe_open(str(folder / WEIGHTS), framework="numpy") as tensors:
        stored = set(tensors.keys())
    places = _places(model, name)
    if unused := sorted(
        stored - {file for files in places.values() for file in files} - model.state_dict().keys()
    ):
        raise ValueError(
            f"{_listed(unused)} of {WEIGHTS} would not be used: {CONFIG} names no such layer ({_CAUSES})"
        )
    if missing := sorted(min(files) for files in places.values() if not files & stored):
        raise ValueError(
            f"Found missing adapter keys: {_listed(missing)}: {CONFIG} asks for what {WEIGHTS} does not have"
        )


def _listed(names: list[str]) -> str:
    return names[0] + (f" and {counted(len(names) - 1, 'other')}" if names[1:] else "")


def _places(model: Any, name: str) -> dict[int, set[str]]:
    """Return the names that a file may have for each of an adapter's parameters; tied ones are one
    parameter."""
    one = re.escape(name)
    own = re.compile(rf"\.(lora_\w+|trainable_tokens_delta)\.{one}(?=\.|$)")
    table = re.compile(rf"\.modules_to_save\.{one}\.")
    found: dict[int, set[str]] = {}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        stored = table.sub(".", own.sub(r".\1", full))
        if stored != full:
            # PEFT stores DoRA's magnitudes without the last part of their name.
            names = found.setdefault(id(parameter), set())
            names |= {stored, stored.replace("_magnitude_vector.weight", "_magnitude_vector")}
    return found
