"""Sizes of a base model for the planner: from the headers of its files, its config.json, or as transformers builds it."""

from functools import cache
from pathlib import Path
from typing import Any

from flytune import json_core
from flytune.errors import RecipeError
from flytune.models import base, config_json, meta_model, tensor_counts, tensor_headers, vocabulary
from flytune.models.config_json import KINDS, Config, geometry
from flytune.models.sizes import Geometry, Linear
from flytune.recipe import Model

__all__ = ["Geometry", "Linear", "config_file", "count", "geometry", "read_geometry", "shipped", "shipped_config", "table_rows"]

_SHIPPED_FILE = Path(__file__).resolve().parent / "base_models.json"


def read_geometry(model: Model) -> Geometry:
    """Return the sizes of a base model with the recipe's added tokens.

    They are those of base_models.json, or of the model's folder, address or repository on the hub (docs/plan.md, "Counted
    models"). The tokenizer is not read: embedding and head may have less rows, where some of the tokens exist already or
    padding has room for them.

    Raises:
        RecipeError: the folder or the file does not exist, the hub cannot be reached, the repository is gated and no token
            is set, config.json has no or wrong sizes, it and the weights disagree, or the model's type cannot be counted here.
    """
    found = _read(model)
    rows = found.vocab_size + len(model.extra_special_tokens)
    return found.model_copy(update={"vocab_size": vocabulary.rows_for(found.vocab_size, rows)})


def _read(model: Model) -> Geometry:
    name = model.name_or_path
    if shipped := shipped_config(model):
        return geometry(shipped, name)
    config = config_json.read(config_file(model))
    return count(config, tensor_headers.read(model), name)


def count(config: dict[str, Any], tensors: dict[str, tensor_headers.Tensor] | None, name: str) -> Geometry:
    """Return the sizes of a model from its config.json and the tensors in its files, where these are at hand.

    Raises:
        RecipeError: as `read_geometry`.
    """
    text, quantized = config_json.text_part(config, name), Config(config, name).quantized
    if tensors is not None and not tensors:
        raise RecipeError(f"model.name_or_path: {name}: its safetensors hold no tensor")
    kind = KINDS.get(text.kind)
    if kind is not None and text.content is config and kind.is_built:
        found, built = geometry(config, name), None
    else:
        config_json.check_sizes(Config(config, name))
        built = _built(config, name, tensors is not None)
        if built is None:
            assert tensors is not None
            return tensor_counts.of_headers(tensors, text, quantized)
        found = tensor_counts.of_built(built, text, quantized)
    if found.dtype is None:
        found = found.model_copy(update={"dtype": Config(config, name).dtype})
    if tensors is None:
        return found
    total, left = tensor_counts.stored_total(tensors, Config(config, name), found.tie_word_embeddings, quantized, built)
    if total is not None:
        tensor_counts.compare(name, ("the headers of its files", total), (found.counted, found.parameters))
    return found.model_copy(update={"left_out": left})


def _built(config: dict[str, Any], name: str, otherwise: bool) -> meta_model.Built | None:
    """Return the model that transformers builds; None where it cannot, if there are headers to count `otherwise`."""
    kind = config.get("model_type")
    if not meta_model.is_installed():
        if otherwise:
            return None
        raise RecipeError(
            f"model.name_or_path: {name}: the sizes of a {config_json.shown(kind)} do not follow from its config.json in "
            f"closed form, and its safetensors are not at hand; name a folder or repository that has them, or "
            f"{tensor_counts.ADVICE}"
        )
    try:
        return meta_model.build(config, name)
    except RecipeError:
        if otherwise:
            return None
        raise


def table_rows(model: Model) -> int | None:
    """Return the rows of the embedding that config.json describes; None where it grows with added tokens, or is unknown."""
    if model.extra_special_tokens:
        return None
    try:
        config = shipped_config(model) or config_json.read(config_file(model))
        rows = config_json.text_part(config, model.name_or_path).content.get("vocab_size")
    except RecipeError:
        return None  # a folder of a tokenizer alone
    return rows if isinstance(rows, int) else None


def shipped_config(model: Model) -> dict[str, Any] | None:
    """Return base_models.json's part of the model's config.json at that revision; None if the model's own is read.

    A folder of this machine is read. For another revision, or none, the hub is asked, as it may have another model.
    """
    entry = shipped().get(model.name_or_path)
    if entry is None or entry["revision"] != model.revision or not base.is_on_hub(model):
        return None
    config: dict[str, Any] = entry["config"]
    return config


@cache
def shipped() -> dict[str, Any]:
    """Return the base models of shipped recipes: `revision`, `source`, and the part of config.json that sizes need."""
    entries: dict[str, Any] = json_core.load(_SHIPPED_FILE.read_bytes())
    return entries


def config_file(model: Model) -> Path:
    """Return the local path of the model's config.json; it is fetched from the hub or its address if necessary.

    Raises:
        RecipeError: there is none, or it cannot be read.
    """
    where = f"model.name_or_path: {model.name_or_path}"
    name = base.local_name(model, weights=False)
    if (folder := Path(name)).is_dir():
        if not (folder / "config.json").is_file():
            found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
            raise RecipeError(f"{where}: the folder has no config.json; it holds {found}")
        return folder / "config.json"

    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", revision=model.revision, local_files_only=not base.hub_answers()))
    except Exception as error:  # noqa: BLE001 (the hub's errors are OSErrors; those of a proxy are not)
        raise base.refused(error, where, _how_to_plan(model)) from None


def _how_to_plan(model: Model) -> str:
    """Return advice on planning when the hub cannot be asked for the sizes of a model."""
    from huggingface_hub import constants

    entry = shipped().get(model.name_or_path)
    pin = f"write model.revision: {entry['revision']}, whose sizes Flytune has; or " if entry else ""
    offline = (
        "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "set HF_HUB_OFFLINE=1 where this machine's cache has the model"
    )
    return f"{pin}name a folder that holds the model's config.json (it is enough for a plan), or {offline}"
