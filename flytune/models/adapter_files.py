"""Files of an adapter that comes from outside: adapter_config.json, of which this is the one reader, and
its tensors, of which each is put into the model, and no other."""

import re
import warnings
from pathlib import Path
from typing import Any

from flytune import json_core, limits
from flytune.recipe import patterns
from flytune.sentences import counted

CONFIG = "adapter_config.json"
LARGEST = 10_000_000
"""Bytes of the file; with the ids of trained rows it may be long."""
DEFAULT_RANK = 8
"""PEFT's rank of a configuration without one."""
LARGEST_RANK = 65_536
"""More than the width of any model's layers; what is allocated is bounded by the weights (`check_ranks`)."""
# What Flytune writes, and PEFT's other fields of an adapter without special features; lists and tables are
# checked below.
_KINDS: dict[str, tuple[type, ...]] = {
    "task_type": (str, type(None)),
    "peft_type": (str,),
    "peft_version": (str,),
    "base_model_name_or_path": (str, type(None)),
    "revision": (str, type(None)),
    "inference_mode": (bool,),
    "r": (int,),
    "lora_alpha": (int, float),
    "lora_dropout": (int, float),
    "target_modules": (list, str, type(None)),
    "exclude_modules": (list, str, type(None)),
    "target_parameters": (list, type(None)),
    "fan_in_fan_out": (bool,),
    "bias": (str,),
    "use_rslora": (bool,),
    "use_dora": (bool,),
    "use_qalora": (bool,),
    "lora_bias": (bool,),
    "ensure_weight_tying": (bool,),
    "qalora_group_size": (int,),
    "modules_to_save": (list, type(None)),
    "init_lora_weights": (bool, str, type(None)),
    "layers_to_transform": (list, int, type(None)),
    "layers_pattern": (list, str, type(None)),
    "rank_pattern": (dict, type(None)),
    "alpha_pattern": (dict, type(None)),
    "trainable_token_indices": (dict, list, type(None)),
    "megatron_core": (str, type(None)),
}
# Fields that PEFT matches with Python's `re`, and the expression that it makes of their text.
_EXPRESSIONS = {
    "target_modules": patterns.WHOLE,
    "exclude_modules": patterns.WHOLE,
    "target_parameters": patterns.WHOLE,  # names: a string is refused
    "modules_to_save": patterns.SAVED,
    "layers_pattern": patterns.NUMBERED,
    "rank_pattern": patterns.END,
    "alpha_pattern": patterns.END,
}
# Fields that build other layers, allocate or import: Flytune writes none of them.
_UNUSED = (
    "auto_mapping",
    "megatron_config",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "velora_config",
    "alora_invocation_tokens",
    "monteclora_config",
    "layer_replication",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "runtime_config",
)


class AdapterConfigRefused(ValueError):
    """An adapter_config.json that cannot be read, or that no adapter of Flytune has."""


def read(content: str | bytes) -> dict[str, Any]:
    """Return the checked content of adapter_config.json.

    Raises:
        AdapterConfigRefused: it is not JSON, or a field is unknown, of another type, absurd, or unused by
            Flytune; or the scale is missing.
    """
    try:
        config = json_core.load_object(content, LARGEST)
    except json_core.JSONError as error:
        raise AdapterConfigRefused(f"not JSON: {error}") from None
    for name, value in config.items():
        if reason := _problem(name, value):
            raise AdapterConfigRefused(f"{name!r:.60}: {reason}")
    if "lora_alpha" not in config:
        raise AdapterConfigRefused(
            "'lora_alpha': missing; PEFT would take 8, whatever the adapter was trained with"
        )
    return config


def check_ranks(config: dict[str, Any], shapes: dict[str, list[int]]) -> None:
    """Compare the ranks of a configuration with the shapes of the adapter's tensors, before PEFT allocates by
    them.

    Raises:
        AdapterConfigRefused: a rank is larger than that of any tensor.
    """
    ranks = {
        shape[0]
        for name, shape in shapes.items()
        if ".lora_A." in name or ".lora_embedding_A" in name
        if shape
    }
    largest = max(ranks, default=0)
    for name, rank in {"r": config.get("r", DEFAULT_RANK), **(config.get("rank_pattern") or {})}.items():
        used = name != "r" or not config.get("rank_pattern")
        if ranks and rank > largest and (used or rank > 4 * largest):
            raise AdapterConfigRefused(f"rank {rank:,} of {name}, but the tensors have {largest:,} at most")


def _problem(name: str, value: Any) -> str | None:
    """Return what is wrong with one field; None if nothing is."""
    entries: list[Any] = list(value.values()) if isinstance(value, dict) else []
    if name in _UNUSED:
        return f"found {value!r:.60}; Flytune's adapters do not use it" if value else None
    if name not in _KINDS:
        return "unknown; Flytune's PEFT has no such field"
    if not isinstance(value, _KINDS[name]) or (isinstance(value, bool) and bool not in _KINDS[name]):
        return f"must be {' or '.join(kind.__name__ for kind in _KINDS[name])}; found {value!r:.60}"
    if name in _EXPRESSIONS and (reason := _pattern_problem(name, value)):
        return reason
    if name == "r":
        return _rank_problem(value)
    if name in ("lora_alpha", "lora_dropout"):
        return _number_problem(value)
    if name == "rank_pattern":
        return next(filter(None, map(_rank_problem, entries)), None)
    if name == "alpha_pattern":
        return next(filter(None, map(_number_problem, entries)), None)
    if name == "trainable_token_indices":
        lists = list(value.values()) if isinstance(value, dict) else [value or []]
        are_ids = all(
            isinstance(ids, list) and all(type(token) is int and 0 <= token < 2**31 for token in ids)
            for ids in lists
        )
        return None if are_ids else f"must be lists of ids of tokens; found {value!r:.60}"
    if (
        isinstance(value, list)
        and name != "layers_to_transform"
        and not all(isinstance(item, str) for item in value)
    ):
        return f"must be a list of names; found {value!r:.60}"
    return None


def _pattern_problem(name: str, value: Any) -> str | None:
    """Return which of the expressions, or of the names, of a field is refused, and why."""
    are_names = name in ("target_modules", "exclude_modules", "target_parameters") and isinstance(value, list)
    written = [value] if isinstance(value, str) else list(value or ())
    most = limits.LISTED if are_names else patterns.MOST_KEYS
    if len(written) > most:
        return f"has {counted(len(written), 'entry', 'entries')}, and {most:,} are the most"
    texts = () if are_names else (pattern for pattern in written if isinstance(pattern, str))
    return next(filter(None, (patterns.problem(text, _EXPRESSIONS[name]) for text in texts)), None)


def _rank_problem(value: Any) -> str | None:
    if type(value) is not int or not 1 <= value <= LARGEST_RANK:
        return f"a rank must be between 1 and {LARGEST_RANK:,}; found {value!r:.60}"
    return None


def _number_problem(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e6:
        return f"must be a number between 0 and a million; found {value!r:.60}"
    return None


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
    check_tensors(model, folder, name)
    return model


def check_tensors(model: Any, folder: Path, name: str) -> None:
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


def trained(model: Any) -> dict[str, Any]:
    """Return the trained parameters of a model with an adapter, by their names in an adapter's file."""
    from peft import get_peft_model_state_dict

    by_name = model.named_parameters(remove_duplicate=False)
    state = {name: parameter for name, parameter in by_name if parameter.requires_grad}
    named: dict[str, Any] = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    return named


def _listed(names: list[str]) -> str:
    return names[0] + (f" and {counted(len(names) - 1, 'other')}" if names[1:] else "")


def _places(model: Any, name: str) -> dict[int, set[str]]:
    """Return the names that a file may have for each of an adapter's parameters; tied ones are one
    parameter."""
    escaped = re.escape(name)
    suffixes = re.compile(rf"\.(lora_\w+|trainable_tokens_delta)\.{escaped}(?=\.|$)")
    table = re.compile(rf"\.modules_to_save\.{escaped}\.")
    places: dict[int, set[str]] = {}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        stored = table.sub(".", suffixes.sub(r".\1", full))
        if stored != full:
            # PEFT stores DoRA's magnitudes without the last part of their name.
            names = places.setdefault(id(parameter), set())
            names |= {stored, stored.replace("_magnitude_vector.weight", "_magnitude_vector")}
    return places
