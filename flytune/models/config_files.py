"""The config.json of a base model: in Flytune's own table, a folder, at an address, or on the hub."""

from functools import cache
from pathlib import Path
from typing import Any

from flytune import json_core
from flytune.errors import RecipeError
from flytune.models import base, config_json
from flytune.recipe import Model

_SHIPPED_FILE = Path(__file__).resolve().parent / "base_models.json"
_KNOWN_FILE = _SHIPPED_FILE.with_name("known_models.json")


def table_rows(model: Model) -> int | None:
    """Return the rows of the embedding that config.json describes; None where it grows with added tokens, or
    is unknown."""
    if model.extra_special_tokens:
        return None
    try:
        config = shipped_config(model) or config_json.read(config_file(model))
        rows = config_json.text_part(config, model.name_or_path).content.get("vocab_size")
    except RecipeError:
        return None  # a folder of a tokenizer alone
    return rows if isinstance(rows, int) else None


def shipped_config(model: Model) -> dict[str, Any] | None:
    """Return base_models.json's part of the model's config.json at that revision; None if the model's own is
    read.

    A folder of this machine is read. For another revision, or none, the hub is asked, as it may have another
    model.
    """
    entry = shipped().get(model.name_or_path)
    if entry is None or entry["revision"] != model.revision or not base.is_on_hub(model):
        return None
    config: dict[str, Any] = entry["config"]
    return config


def known_config(model: Model) -> dict[str, Any] | None:
    """Return what Flytune knows of the config.json of a model on the hub that is named without a revision,
    for planning while the hub does not answer; None for all others.

    A name's sizes hardly ever change, and training reads the model itself.
    """
    known = known_name(model.name_or_path) if model.revision is None and base.is_on_hub(model) else None
    return None if known is None or base.hub_answers() else known


def known_name(name: str) -> dict[str, Any] | None:
    """Return what Flytune knows of the config.json of a model on the hub, of whatever revision; None for
    unknown names."""
    config: dict[str, Any] | None = _known().get(name)
    return config


@cache
def _known() -> dict[str, Any]:
    rows = json_core.load(_KNOWN_FILE.read_bytes())["models"]
    of_recipes = {name: entry["config"] for name, entry in shipped().items()}
    return of_recipes | {name: row["config"] for row in rows for name in row["names"]}


@cache
def shipped() -> dict[str, Any]:
    """Return the base models of shipped recipes: `revision`, `source`, and the part of config.json that sizes
    need."""
    entries: dict[str, Any] = json_core.load(_SHIPPED_FILE.read_bytes())
    return entries


def config_file(model: Model) -> Path:
    """Return the local path of the model's config.json; it is fetched from the hub or its address if
    necessary.

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
        return Path(
            hf_hub_download(
                name, "config.json", revision=model.revision, local_files_only=not base.hub_answers()
            )
        )
    except Exception as error:  # noqa: BLE001 (the hub's errors are OSErrors; those of a proxy are not)
        raise base.refused(error, where, _how_to_plan(model)) from None


def _how_to_plan(model: Model) -> str:
    """Return advice on planning when the hub cannot be asked for the sizes of a model."""
    from huggingface_hub import constants

    entry = shipped().get(model.name_or_path)
    pin = f"write model.revision: {entry['revision']}, whose sizes Flytune has; or " if entry else ""
    offline = (
        "unset HF_HUB_OFFLINE"
        if constants.HF_HUB_OFFLINE
        else "set HF_HUB_OFFLINE=1 where this machine's cache has the model"
    )
    return f"{pin}name a folder that holds the model's config.json (it is enough for a plan), or {offline}"
