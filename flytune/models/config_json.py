"""The config.json of a base model: where it is (Flytune's own table, a folder, an address, the hub), and its
strict reading. What is wrong with its sizes is an error of the recipe that names the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from flytune import files, json_core
from flytune.errors import RecipeError
from flytune.models import base
from flytune.recipe import Model, patterns
from training_estimates import config_json
from training_estimates.config_json import NOT_QUANTIZED, Config, shown
from training_estimates.errors import LibrariesMissingError, SizesError

LARGEST = 10_000_000
"""Bytes of a config.json that is read; published ones have kilobytes."""


@contextmanager
def recipe_errors() -> Iterator[None]:
    """Turn an error about a model's sizes into one of the recipe that names the model."""
    try:
        yield
    except SizesError as error:
        advice = " (pip install flytune[train])" if isinstance(error, LibrariesMissingError) else ""
        raise RecipeError(f"model.name_or_path: {error}{advice}") from None


def parse(content: bytes, where: str) -> dict[str, Any]:
    """Return a config.json's content.

    Raises:
        RecipeError: it is not a JSON object in UTF-8, or has more than LARGEST bytes; with `where`.
    """
    try:
        config = json_core.load(content, LARGEST)
    except json_core.JSONError as error:
        raise RecipeError(f"model.name_or_path: {where}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise RecipeError(f"model.name_or_path: {where}: {shown(config)} is not an object")
    return config


def read(path: Path) -> dict[str, Any]:
    """Return the content of a config.json; raises as `parse`, and if it cannot be read."""
    try:
        return parse(files.read_regular(path, LARGEST), str(path))
    except OSError as error:
        raise RecipeError(f"model.name_or_path: {path}: cannot be read: {error.strerror}") from None


def text_part(config: dict[str, Any], name: str) -> Config:
    """Return the part of a config.json that describes the decoder: text_config, if it has one.

    Raises:
        RecipeError: text_config is not an object.
    """
    with recipe_errors():
        return config_json.text_part(config, name)


def check_expressions(config: dict[str, Any], name: str) -> None:
    """Check the expressions that name the layers a published quantization leaves out.

    Raises:
        RecipeError: the matching of one could take long, or its section is no section of names.
    """
    whole = Config(config, name)
    with recipe_errors():
        if whole.quantized is None:
            return
        section = whole.table("quantization_config")
        for key in NOT_QUANTIZED:
            reasons = [patterns.problem(written, patterns.CONVERTED) for written in section.get(key) or []]
            whole.problems += [f"quantization_config.{key}: {reason}" for reason in reasons if reason]
        whole.check()


_SHIPPED_FILE = Path(__file__).resolve().parent / "base_models.json"
_KNOWN_FILE = _SHIPPED_FILE.with_name("known_models.json")


def table_rows(model: Model) -> int | None:
    """Return the rows of the embedding that config.json describes; None where it grows with added tokens, or
    is unknown."""
    config = {} if model.extra_special_tokens else _readable(model)
    try:
        rows = text_part(config, model.name_or_path).content.get("vocab_size")
    except RecipeError:
        return None
    return rows if isinstance(rows, int) else None


def model_type(model: Model) -> str | None:
    """Return the model type in a model's config.json; None where it cannot be read, or names none."""
    kind = _readable(model).get("model_type")
    return kind if isinstance(kind, str) else None


def _readable(model: Model) -> dict[str, Any]:
    """Return the content of a model's config.json; empty of a folder of a tokenizer alone."""
    try:
        return shipped_config(model) or read(config_file(model))
    except RecipeError:
        return {}


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


def published_quantization(model: Model) -> dict[str, Any]:
    """Return the section of the base's config.json about its quantized weights; empty of other bases.

    Raises:
        RecipeError: there is no config.json, or it cannot be read.
    """
    return read(config_file(model)).get("quantization_config") or {}


def config_file(model: Model) -> Path:
    """Return the local path of the model's config.json; it is fetched from the hub or its address if
    necessary.

    Raises:
        RecipeError: there is none, or it cannot be read.
    """
    where = f"model.name_or_path: {model.name_or_path}"
    name = base.local_name(model, weights=False)
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            entries = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
            raise RecipeError(f"{where}: the folder has no config.json; it holds {entries}")
        return folder / "config.json"

    from huggingface_hub import hf_hub_download

    answers = base.hub_answers()
    try:
        path = hf_hub_download(name, "config.json", revision=model.revision, local_files_only=not answers)
    except Exception as error:  # noqa: BLE001 (the hub's errors are OSErrors; those of a proxy are not)
        raise base.refused(error, where, _how_to_plan(model)) from None
    base.refuse_adapter(model, ask=answers)
    return Path(path)


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
