"""The artifact: one folder with weights, tokenizer and everything needed to run again; stored whole or not at all."""

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from tqdm import tqdm

from flytune import calibration, card, report, xray
from flytune.data.bad_rows import BAD_ROWS
from flytune.errors import ExportError
from flytune.metrics import Metrics
from flytune.plans import Plan
from flytune.probing import PROBE
from flytune.recipe import Recipe
from flytune.recording import STEPS
from flytune.records import Manifest, StoredFile, TrainingResult
from flytune.sealing import MANIFEST as EXPORT
from flytune.sealing import Export
from flytune.strict import Record

log = logging.getLogger(__name__)

_Kind = TypeVar("_Kind", bound=Record)

CONTENTS = "artifact.json"
# Pickles run code where they are read; the rest is state that only a running training needs.
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"}
STATE = ("optimizer", "scheduler", "scaler", "rng_state", "trainer_state", "training_args", "global_step", "checkpoint-")
CACHES = {"__pycache__", ".cache", ".git"}


class Contents(Record):
    """artifact.json, written last: an artifact without one is not whole."""

    files: list[StoredFile]


def store(recipe: Recipe, plan: Plan, dataset: Path, trained: Path, metrics: Metrics, out: Path) -> Path:
    """Assembles the artifact in `out`, a new or empty folder, and returns it. Weights are hard-linked where that works.

    Raises:
        ExportError: `out` holds something; `trained` lacks weights, or has pickles, optimizer state, empty or cut files.
    """
    if out.exists() and any(out.iterdir()):
        raise ExportError(f"{out}: not empty; an artifact is stored into a new folder")
    weights = _checked_weights(trained)
    manifest = read(Manifest, dataset / "manifest.json")
    training = read(TrainingResult, trained / "training.json")

    out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(weights, out / weights.name, copy_function=_link)
    (out / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    for name, record in (("plan", plan), ("manifest", manifest), ("training", training), ("metrics", metrics)):
        record.write(out / f"{name}.json")
    # A log that was lost is no reason to lose the model too; the others are what the gate needs to look once more.
    for name in (STEPS, EXPORT, PROBE):
        if (trained / name).is_file():
            shutil.copy(trained / name, out)
    if (dataset / BAD_ROWS).is_file():
        shutil.copy(dataset / BAD_ROWS, out)
    calibration.compare(recipe, plan, manifest, training).write(out / calibration.COMPARISON)
    (out / "report.html").write_text(
        report.render(recipe, plan, manifest, training, metrics, xray.section(dataset)), encoding="utf-8"
    )
    (out / "README.md").write_text(card.render(recipe, plan, manifest, training, metrics), encoding="utf-8")
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    Contents(files=[_stored(path, out) for path in tqdm(files, desc="hashing the artifact", delay=2)]).write(out / CONTENTS)
    return out


def facts(artifact: Path, recipe: Recipe, metrics: Metrics) -> dict[str, str | float | None]:
    """An artifact in a few values, for a catalogue."""
    return {
        "version": published_name(artifact, recipe),
        "method": recipe.method.name,
        "base_commit": read(Export, artifact / EXPORT).revision if (artifact / EXPORT).is_file() else None,
        "base_perplexity": metrics.base.perplexity,
        "tuned_perplexity": metrics.tuned.perplexity,
        "loss_difference": metrics.loss_difference,
        "loss_difference_low": metrics.loss_difference_low,
        "loss_difference_high": metrics.loss_difference_high,
    }


def published_name(artifact: Path, recipe: Recipe) -> str:
    """The recipe's name and 12 hex digits of the artifact's content: each run has its own, an equal artifact the same."""
    return f"{recipe.name}-{hashlib.sha256((artifact / CONTENTS).read_bytes()).hexdigest()[:12]}"


def publish(artifact: Path, address: str, name: str) -> str:
    """Copies an artifact to `address`/`name`, a folder or any fsspec address, and returns that; artifact.json comes last.

    Nothing is ever overwritten. An equal artifact that is there already, or the equal part of one, is left as it is.

    Raises:
        ExportError: something else is there, or the address cannot be written to.
    """
    contents = read(Contents, artifact / CONTENTS)
    target = f"{address.rstrip('/')}/{name}"
    try:
        _publish(artifact, contents, target)
    except ExportError:
        raise
    except Exception as error:  # Each file system has errors of its own; botocore's are not even OSErrors.
        reason = " ".join(str(error).split())[:300]
        raise ExportError(f"publish.address: {address}: cannot be written to: {type(error).__name__}: {reason}") from error
    return target


def _publish(artifact: Path, contents: Contents, target: str) -> None:
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(target)
    filesystem.invalidate_cache()
    present = {found.removeprefix(root).strip("/") for found in filesystem.find(root)}
    if CONTENTS in present:
        if filesystem.cat_file(f"{root}/{CONTENTS}") != (artifact / CONTENTS).read_bytes():
            raise _taken(target, "another artifact")
        log.info("%s: already published", target)
        return
    wanted = {stored.file: stored.sha256 for stored in contents.files}
    for file in sorted(present):
        if _remote_sha256(filesystem, f"{root}/{file}") != wanted.get(file):
            raise _taken(target, f"{file}, which is not this artifact's")
    missing = [file for file in wanted if file not in present]
    for file in tqdm([*missing, CONTENTS], desc="publishing", unit=" files", delay=2):
        filesystem.makedirs(f"{root}/{file}".rpartition("/")[0], exist_ok=True)
        filesystem.put_file(str(artifact / file), f"{root}/{file}")


def _taken(target: str, found: str) -> ExportError:
    return ExportError(f"{target}: holds {found}; nothing is overwritten: remove it, or change the recipe's name or address")


def _checked_weights(trained: Path) -> Path:
    """`model/` or `adapter/` below `trained`, looked through."""
    found = [trained / name for name in ("model", "adapter") if list((trained / name).glob("*.safetensors"))]
    if len(found) != 1:
        what = "both model/ and adapter/" if found else "neither model/ nor adapter/ with *.safetensors"
        raise ExportError(f"{trained}: holds {what}; nothing was stored")
    for path in sorted(path for path in trained.rglob("*") if path.is_file()):
        if reason := _unfit(path, path.relative_to(trained)):
            raise ExportError(f"{path.relative_to(trained)}: {reason}; nothing was stored")
    for index in found[0].glob("*.safetensors.index.json"):
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if missing := sorted(name for name in named if not (found[0] / name).is_file()):
            raise ExportError(f"{found[0].name}/{missing[0]}: stands in {index.name} but is not there; nothing was stored")
    return found[0]


def _unfit(path: Path, relative: Path) -> str | None:
    """Why a file may not be in an artifact, if so."""
    if path.suffix in PICKLES:
        return "a pickle; weights are stored as safetensors alone"
    if any(part.startswith(STATE) for part in relative.parts):
        return "state of a running training, which is no part of a model"
    if CACHES.intersection(relative.parts):
        return "a cache"
    if not path.stat().st_size:
        return "empty"
    if path.suffix == ".safetensors" and (expected := _safetensors_size(path)) != path.stat().st_size:
        return f"cut short or damaged: its header says {expected:,} bytes, it has {path.stat().st_size:,}"
    return None


def _safetensors_size(path: Path) -> int:
    """Bytes that a safetensors file has by its own header: 8 bytes of length, the JSON header, the tensors; 0 if unreadable."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length) if length < 2**27 else b"")
            return 8 + length + max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError):
            return 0


def read(kind: type[_Kind], path: Path) -> _Kind:
    """A record of an artifact.

    Raises:
        ExportError: it is not there, or no such record.
    """
    try:
        return kind.read(path)
    except FileNotFoundError:
        raise ExportError(f"{path}: not there, so what it speaks of is not whole; nothing was stored") from None
    except ValidationError as error:
        raise ExportError(f"{path}: not a {kind.__name__} ({error.error_count()} mistakes); nothing was stored") from None


def _link(source: str, target: str) -> Any:
    """A hard link for weights (gigabytes that nobody edits), a copy of all else and across file systems."""
    if source.endswith(".safetensors"):
        try:
            return os.link(os.path.realpath(source), target)
        except OSError:
            log.debug("%s: cannot be linked, so it is copied", source)
    return shutil.copy(source, target)


def _stored(path: Path, out: Path) -> StoredFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return StoredFile(file=path.relative_to(out).as_posix(), size=path.stat().st_size, sha256=digest)


def _remote_sha256(filesystem: Any, path: str) -> str:
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()
