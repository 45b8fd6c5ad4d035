"""What is in a store: the artifacts below an address, by their small files alone."""

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from tqdm import tqdm

from flytune import yaml_core
from flytune.artifacts.build import CONTENTS
from flytune.errors import ExportError
from flytune.schema import Strict

COMBINATION = "combination.json"
"""In an artifact that was made of others (flytune.adapters.combining)."""
ADAPTER = "adapter_config.json"
_RECORDS = ("recipe.yaml", CONTENTS, "metrics.json", "manifest.json", COMBINATION, ADAPTER)


class Entry(Strict):
    """One artifact. What cannot be read of it is None, and told in `problems`."""

    name: str
    """Of its folder."""
    address: str
    kind: str | None = None
    """adapter or model."""
    base: str | None = None
    revision: str | None = None
    """The commit of the base that an adapter was trained on; else as the recipe has it."""
    method: str | None = None
    data: str | None = None
    rows: int | None = None
    data_sha256: str | None = None
    """Of the tokenized samples."""
    base_perplexity: float | None = None
    """On the held-out samples, as tuned_perplexity is; None for what was never evaluated."""
    tuned_perplexity: float | None = None
    made_from: list[str] = Field(default=[])
    """The addresses that a combined adapter was made from."""
    stored: datetime | None = None
    """When the store last wrote its artifact.json: no file of an artifact says when it was made."""
    size: int | None = None
    """In bytes, all files."""
    problems: list[str] = Field(default=[])


def listed(address: str) -> list[Entry]:
    """The artifacts right below `address` (a folder or any fsspec address), or the one that lies there; newest first.

    Raises:
        ExportError: the address cannot be read, or no artifact is there.
    """
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(address)
        filesystem.invalidate_cache()
        files = list(filesystem.find(root, maxdepth=2))
    except Exception as error:  # each file system has errors of its own: credentials, network, a package that is missing
        raise ExportError(f"{address}: cannot be read: {_line(error)}") from error
    folders = sorted({file.rpartition("/")[0] for file in files if file.rpartition("/")[2] in ("recipe.yaml", CONTENTS)})
    if root.rstrip("/") in folders:
        folders = [root.rstrip("/")]
    if not folders:
        raise ExportError(f"{address}: no artifact there, nor right below it: no recipe.yaml, no {CONTENTS}")
    paths = [f"{folder}/{name}" for folder in folders for name in _RECORDS]
    # All at once: an object store takes its time over each.
    read = filesystem.cat(paths, on_error="return")
    entries = [
        _entry(filesystem, folder, {name: read.get(f"{folder}/{name}") for name in _RECORDS})
        for folder in tqdm(folders, desc="artifacts", delay=2)
    ]
    return sorted(entries, key=lambda entry: entry.stored or datetime.min.replace(tzinfo=UTC), reverse=True)


def _entry(filesystem: Any, folder: str, read: dict[str, Any]) -> Entry:
    problems: list[str] = []
    combined = isinstance(read[COMBINATION], bytes)

    def part(name: str, take: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        content = read[name]
        if not isinstance(content, bytes):
            reason = "not there" if isinstance(content, FileNotFoundError) else f"cannot be read: {_line(content)}"
            problems.append(f"{name}: {reason}")
            return {}
        try:
            return take(yaml_core.load(content) if name.endswith(".yaml") else json.loads(content))
        except (ValueError, KeyError, TypeError, AttributeError, yaml_core.YAMLError) as error:
            problems.append(f"{name}: {_line(error)}")
            return {}

    # By their keys, not as records: what an older or newer Flytune has stored is listed too.
    found = part("recipe.yaml", _of_recipe) | part(CONTENTS, _of_contents)
    if found.get("kind") == "adapter":
        found |= part(ADAPTER, lambda config: {"revision": config["revision"]})
    if combined:
        found |= part(COMBINATION, lambda made: {"made_from": [source["address"] for source in made["sources"]]})
    else:
        found |= part("manifest.json", _of_manifest) | part("metrics.json", _of_metrics)
    address = filesystem.unstrip_protocol(folder).removeprefix("file://")
    stored = _modified(filesystem, f"{folder}/{CONTENTS}")
    try:
        return Entry(name=folder.rpartition("/")[2], address=address, stored=stored, problems=problems, **found)
    except ValidationError as error:
        problems += [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        return Entry(name=folder.rpartition("/")[2], address=address, stored=stored, problems=problems)


def _of_recipe(recipe: Any) -> dict[str, Any]:
    model, method = recipe["model"], recipe["method"]
    name = method if isinstance(method, str) else method["name"]
    return {"base": model["name_or_path"], "revision": model.get("revision"), "method": name}


def _of_contents(contents: Any) -> dict[str, Any]:
    files = contents["files"]
    kind = "adapter" if any(file["file"] == ADAPTER for file in files) else "model"
    return {"size": sum(file["size"] for file in files), "kind": kind}


def _of_manifest(manifest: Any) -> dict[str, Any]:
    return {"data": manifest["source"], "rows": manifest["rows"], "data_sha256": manifest["content_sha256"]}


def _of_metrics(metrics: Any) -> dict[str, Any]:
    return {f"{model}_perplexity": metrics[model]["perplexity"] for model in ("base", "tuned")}


def _modified(filesystem: Any, path: str) -> datetime | None:
    try:
        when: datetime = filesystem.modified(path)
    except (OSError, NotImplementedError, KeyError):
        return None
    return when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)


def fingerprint(contents: dict[str, Path]) -> str:
    """64 hex digits that name the artifacts whose artifact.json files these are, under their names.

    Raises:
        ExportError: one has none.
    """
    digest = hashlib.sha256()
    for name, path in sorted(contents.items()):
        try:
            digest.update(json.dumps([name, hashlib.sha256(path.read_bytes()).hexdigest()]).encode())
        except OSError:
            raise ExportError(f"{name}: no {CONTENTS}, so no artifact lies there, or not a whole one") from None
    return digest.hexdigest()


def _line(error: Any) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
