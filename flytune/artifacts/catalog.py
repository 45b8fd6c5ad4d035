"""Catalog of the artifacts below an address, read from their small files."""

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from tqdm import tqdm

from flytune import json_core, names, yaml_core
from flytune.addresses import reason, redact
from flytune.errors import ExportError
from flytune.files import sha256_of
from flytune.mistakes import mistakes
from flytune.records import Contents, MeasuredFigure
from flytune.records.contents import CONTENTS, kind_of
from flytune.records.metrics import figures_of
from flytune.schema import RecordError, Strict
from flytune.storage import Storage

COMBINATION = "combination.json"
"""File of an artifact that was made of other artifacts (flytune.adapters.combining)."""
ADAPTER = "adapter_config.json"
_RECORDS = ("recipe.yaml", CONTENTS, "metrics.json", "manifest.json", COMBINATION, ADAPTER)


class Entry(Strict):
    """One artifact. A field that cannot be read is None, and `problems` says why."""

    name: str
    """Name of its folder."""
    address: str
    kind: str | None = None
    """Kind of weights: adapter or model."""
    base: str | None = None
    revision: str | None = None
    """Commit of the base model that an adapter was trained on; otherwise the recipe's revision."""
    method: str | None = None
    data: str | None = None
    rows: int | None = None
    data_sha256: str | None = None
    """SHA-256 of the tokenized samples."""
    figures: list[MeasuredFigure] = Field(default=[])
    """Figures of its objective on the held-out samples, the most important first; empty if it was not
    evaluated."""
    base_perplexity: float | None = None
    """Perplexity of the base model on the held-out samples; None for an objective without one, or if it was
    not evaluated."""
    tuned_perplexity: float | None = None
    """Perplexity of the fine-tuned model on the held-out samples; None like that of the base."""
    made_from: list[str] = Field(default=[])
    """Addresses of the artifacts that a combined adapter was made from."""
    stored: datetime | None = None
    """Time at which the store last wrote its artifact.json; the artifact's own files contain no time."""
    size: int | None = None
    """Size of all files in bytes."""
    problems: list[str] = Field(default=[])


def list_artifacts(address: str) -> list[Entry]:
    """List the artifact at `address` (a folder or any fsspec address), or those directly below it, newest
    first.

    Raises:
        ExportError: the address cannot be read, or there is no artifact.
    """
    storage = Storage(address, key="", error=ExportError, failed="cannot be read", retry=False)
    paths = [name.rpartition("/") for name in storage.files(depth=2)]
    folders = sorted({folder for folder, _, name in paths if name in ("recipe.yaml", CONTENTS)})
    if "" in folders:
        folders = [""]
    if not folders:
        raise ExportError(f"{address}: no artifact there, nor right below it: no recipe.yaml, no {CONTENTS}")
    # All at once: each read from an object store takes a while.
    wanted = [f"{folder}/{name}".lstrip("/") for folder in folders for name in _RECORDS]
    contents = storage.read_each(wanted, json_core.LARGEST)
    listed = {folder: contents[f"{folder}/{CONTENTS}".lstrip("/")] for folder in folders}
    others = {
        folder
        for folder, content in listed.items()
        if isinstance(content, bytes) and kind_of(content) != "artifact"
    }
    folders = [folder for folder in folders if folder not in others]
    if not folders:
        raise ExportError(
            f"{address}: no artifact there, nor right below it, only the folders of sweeps, answers or data "
            "sets"
        )
    entries = [
        _entry(storage, folder, {name: contents[f"{folder}/{name}".lstrip("/")] for name in _RECORDS})
        for folder in tqdm(folders, desc="artifacts", delay=2)
    ]
    return sorted(entries, key=lambda entry: entry.stored or datetime.min.replace(tzinfo=UTC), reverse=True)


def _entry(storage: Storage, folder: str, contents: dict[str, Any]) -> Entry:
    problems: list[str] = []
    combined = isinstance(contents[COMBINATION], bytes)
    hashes, problem = _hashes(contents[CONTENTS])

    def part(name: str, take: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        content = contents[name]
        if not isinstance(content, bytes):
            problem = (
                "not there"
                if isinstance(content, FileNotFoundError)
                else f"cannot be read: {reason(content)}"
            )
            problems.append(f"{name}: {problem}")
            return {}
        try:
            taken = take(
                yaml_core.load(content) if name.endswith(".yaml") else json_core.load_object(content)
            )
            if name in hashes and hashlib.sha256(content).hexdigest() != hashes[name]:
                problems.append(f"{name}: its content is not what was written, by {CONTENTS}")
            return taken
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            ArithmeticError,
            yaml_core.YAMLError,
        ) as error:
            problems.append(f"{name}: {reason(error)}")
            return {}

    # By keys, not as records, so that artifacts of older and newer versions of Flytune are listed too.
    fields = part("recipe.yaml", _of_recipe) | part(CONTENTS, _of_contents)
    if problem and not any(problem.startswith(f"{CONTENTS}: ") for problem in problems):
        problems.append(f"{CONTENTS}: {problem}")
    if fields.get("kind") == "adapter":
        fields |= part(ADAPTER, lambda config: {"revision": config["revision"]})
    if combined:
        fields |= part(
            COMBINATION,
            lambda combination: {"made_from": [source["address"] for source in combination["sources"]]},
        )
    else:
        fields |= part("manifest.json", _of_manifest) | part("metrics.json", _of_metrics)
    address = storage.url(folder)
    stored = storage.modified(f"{folder}/{CONTENTS}".lstrip("/"))
    known = {"name": address.rpartition("/")[2], "address": address, "stored": stored, "problems": problems}
    # Addresses and names of old records may have credentials, which are refused today.
    fields = {key: _redacted(value) for key, value in fields.items()}
    try:
        return Entry.model_validate(known | fields)
    except ValidationError as error:
        wrong = {str(item["loc"][0]) for item in error.errors()}
        problems += mistakes(error, Entry)
        return Entry.model_validate(known | {key: value for key, value in fields.items() if key not in wrong})


def _hashes(content: Any) -> tuple[dict[str, str], str]:
    """Return the hashes of the files that artifact.json lists, and why it is no such list if it is none."""
    if not isinstance(content, bytes):
        return {}, ""
    try:
        return {file.file: file.sha256 for file in Contents.parse(content).files}, ""
    except RecordError as error:
        return {}, str(error)


def _redacted(value: Any) -> Any:
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def _of_recipe(recipe: Any) -> dict[str, Any]:
    model, method = recipe["model"], recipe["method"]
    name = method if isinstance(method, str) else method["name"]
    return {"base": model["name_or_path"], "revision": model.get("revision"), "method": name}


def _of_contents(contents: Any) -> dict[str, Any]:
    files = contents["files"]
    names.check_list([file["file"] for file in files])
    kind = "adapter" if any(file["file"] == ADAPTER for file in files) else "model"
    return {"size": sum(file["size"] for file in files), "kind": kind}


def _of_manifest(manifest: Any) -> dict[str, Any]:
    return {"data": manifest["source"], "rows": manifest["rows"], "data_sha256": manifest["content_sha256"]}


def _of_metrics(metrics: Any) -> dict[str, Any]:
    figures = figures_of(metrics)
    sides = {
        side_name: next(
            (getattr(figure, side_name) for figure in figures if figure.name == "perplexity"), None
        )
        for side_name in ("base", "tuned")
    }
    return {"figures": figures} | {
        f"{side_name}_perplexity": side and side.value for side_name, side in sides.items()
    }


def fingerprint(contents: dict[str, Path]) -> str:
    """Return 64 hex digits that identify artifacts and their names, from the path of each one's artifact.json
    by name.

    Raises:
        ExportError: an artifact has no artifact.json.
    """
    digest = hashlib.sha256()
    for name, path in sorted(contents.items()):
        try:
            digest.update(json.dumps([name, sha256_of(path)]).encode())
        except OSError:
            raise ExportError(f"{name}: no {CONTENTS}: there is no artifact, or an incomplete one") from None
    return digest.hexdigest()
