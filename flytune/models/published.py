"""Files of the base model as they were published: what is written of a trained model has their keys and their
spelling.

transformers 5 writes config.json in a form of its own, which version 4 and programs that read as it does take
for another model: a rotary base of 10,000 instead of 500,000, without an error. So the base's files are
written again, and only what training has changed is changed in them. Where the form differs between versions,
both are there.
"""

import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flytune import json_core
from flytune.errors import RecipeError
from flytune.models import base, config_json
from flytune.recipe import Model

log = logging.getLogger(__name__)
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
LARGEST = 200_000_000
"""Bytes of a file of JSON; the largest published ones (tokenizer.json) have some 40 million."""

_OF_THE_RUN = {
    "dtype",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "router_aux_loss_coef",
    "transformers_version",
    "use_cache",
}
"""Keys of a live configuration that are settings of a process, or are written by themselves."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MISSING = object()


def base_name(model: Model) -> str:
    """Return the folder of the base model's small files, or its id on the hub."""
    return base.local_name(model, weights=False)


def cached(name: str, revision: str | None, file: str) -> Path | None:
    """Return the local path of a file in a folder, or of a model on the hub; None if it has none."""
    from transformers.utils.hub import cached_file

    file_name = cached_file(
        name,
        file,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(file_name) if file_name else None


def content_of(model: Model, name: str) -> dict[str, Any] | None:
    """Return the object in a JSON file of the base model; None if it has none.

    Raises:
        RecipeError: it is not a JSON object.
    """
    if (path := cached(base_name(model), model.revision, name)) is None:
        return None
    try:
        content: dict[str, Any] = json_core.load_object(path.read_bytes(), LARGEST)
    except json_core.JSONError as error:
        raise RecipeError(
            f"model.name_or_path: {model.name_or_path}: its {name} cannot be read: {error}"
        ) from None
    return content


def write_config(config: Any, model: Model, dtype: str, architecture: str, folder: Path) -> None:
    """Write config.json into `folder`: that of the base, with what a live configuration has changed.

    Args:
        config: the live configuration.
        model: the recipe's model section.
        dtype: dtype of the weights that are stored.
        architecture: name of the model's class.
        folder: the folder, which exists.
    """
    before = base.configuration(model)
    content = config_json.read(config_json.config_file(model))
    for key in getattr(before, "sub_configs", ()):
        # Of a model of texts and images, the language model alone may be loaded.
        if type(before) is not type(config) and type(inner := getattr(before, key)) is type(config):
            before, content = inner, {"model_type": config.model_type, **content.get(key, {})}
    _change(content, before.to_dict(), config.to_dict(), config)
    for part in _parts(content):
        for key in ("dtype", "torch_dtype"):
            if part is content or key in part:
                part[key] = dtype
    content["architectures"] = [architecture]
    content = _in_both_forms(content, config)
    (folder / CONFIG).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_generation_config(generation_config: Any, model: Model, folder: Path) -> None:
    """Write generation_config.json into `folder`: that of the base, with the live one's tokens that end and
    pad.

    transformers refuses to write a temperature without do_sample, and many published files have one.
    """
    content = content_of(model, GENERATION_CONFIG)
    if content is None:
        content = json_core.load_object(generation_config.to_json_string(use_diff=True))
    for key in _TOKENS:
        value = getattr(generation_config, key)
        if value is not None and value != content.get(key) and [value] != content.get(key):
            content[key] = value
    (folder / GENERATION_CONFIG).write_text(
        json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def make_savable(model: Any) -> None:
    """Let transformers save a live model whose generation config it would refuse: keep only its tokens.

    Its settings of sampling are not used in training; `write_generation_config` writes the base's.
    """
    model.generation_config = savable(model.generation_config)


def savable(generation_config: Any) -> Any:
    """Return a generation config that transformers saves: itself, or one of its tokens alone."""
    from transformers import GenerationConfig

    try:
        generation_config.validate(strict=True)
    except ValueError:
        return GenerationConfig(**{key: getattr(generation_config, key) for key in _TOKENS})
    return generation_config


def _parts(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration and those inside it."""
    yield content
    for key, value in content.items():
        if isinstance(value, dict) and key.endswith("_config") and key != "quantization_config":
            yield from _parts(value)


def _change(content: dict[str, Any], before: dict[str, Any], after: dict[str, Any], config: Any) -> None:
    """Change the keys in `content` that have changed from `before` to `after`, in the spelling that `content`
    has."""
    for key in sorted({*before, *after} - _OF_THE_RUN):
        old, new = before.get(key, _MISSING), after.get(key, _MISSING)
        if old == new or key.startswith("_"):
            continue
        inner = getattr(config, key, None)
        if isinstance(old, dict) and isinstance(new, dict) and hasattr(inner, "to_dict"):
            _change(content.setdefault(key, {}), old, new, inner)
            continue
        aliases = [
            alias for alias, name in (getattr(config, "attribute_map", None) or {}).items() if name == key
        ]
        for name in [name for name in (key, *aliases) if name in content] or [key]:
            content.pop(name, None) if new is _MISSING else content.update({name: new})
        if key == "rope_parameters":
            for name in _in_old_form(new if isinstance(new, dict) else {}, content):
                content.pop(name, None)
        if key == "id2label" and "num_labels" in content:
            content["num_labels"] = len(new) if isinstance(new, dict) else content["num_labels"]


def _in_both_forms(content: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return a configuration with the rotary embedding in both forms, where transformers then reads the
    same."""
    extended = copy.deepcopy(content)
    _add_forms(extended, config)
    try:
        return extended if _rotary(extended, config) == _rotary(content, config) else content
    except Exception as error:  # noqa: BLE001 (a class of transformers that knows the new form alone, and refuses keys of the old one)
        log.debug("%s: %s", type(config).__name__, error)
        return content


def _add_forms(content: dict[str, Any], config: Any) -> None:
    for key, value in content.items():
        if isinstance(value, dict) and hasattr(getattr(config, key, None), "to_dict"):
            _add_forms(value, getattr(config, key))
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or not parameters:
        return
    if content.get("rope_parameters"):
        for key, value in _in_old_form(content["rope_parameters"], content).items():
            content.setdefault(key, value)
        for alias, name in (config.attribute_map or {}).items():
            if name == "num_local_experts" and name in content:
                content.setdefault(alias, content[name])
    else:
        content["rope_parameters"] = parameters


def _in_old_form(parameters: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Return the keys by which transformers 4 reads rope_parameters."""
    kind, older = str(content.get("model_type")), dict[str, Any]()
    theta, share = (
        ("rotary_emb_base", "rotary_pct")
        if kind.startswith("gpt_neox")
        else ("rope_theta", "partial_rotary_factor")
    )
    local = parameters.get("sliding_attention")
    if isinstance(local, dict):
        older["rope_local_base_freq"] = local.get("rope_theta")
    inner = parameters.get("full_attention")
    if isinstance(inner, dict):
        parameters = inner
    for key, name in (("rope_theta", theta), ("partial_rotary_factor", share)):
        if key in parameters:
            older[name] = parameters[key]
    scaling = {
        key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")
    }
    scaled_by = scaling.get("rope_type", "default")
    if scaled_by == "longrope":
        # Version 4 takes the length from the configuration, and for Phi-3 no other keys than these three.
        older["original_max_position_embeddings"] = scaling.get("original_max_position_embeddings")
        if kind.startswith("phi"):
            factors = {key: scaling.get(key) for key in ("short_factor", "long_factor")}
            scaling = {"type": scaled_by, **factors}
    if scaled_by != "default":
        older["rope_scaling"] = scaling
    return {key: value for key, value in older.items() if value is not None}


def _rotary(content: dict[str, Any], config: Any) -> Any:
    """Return what transformers reads of the rotary embedding in a configuration of this class."""
    read = type(config)(**copy.deepcopy(content)).get_text_config()
    parameters = copy.deepcopy(getattr(read, "rope_parameters", None) or {})
    for section in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        section.pop("type", None)
    return parameters
