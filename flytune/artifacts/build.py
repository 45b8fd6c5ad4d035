"""The artifact: one folder with weights, tokenizer and everything that a rerun needs; stored completely or not at all."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from flytune.artifacts.comparison import compare
from flytune.artifacts.publish import publish, published_name
from flytune.data.bad_rows import BAD_ROWS
from flytune.errors import ExportError
from flytune.evaluation import guards
from flytune.export.manifest import MANIFEST as EXPORT
from flytune.models.probe import PROBE
from flytune.recipe import Recipe
from flytune.records import Contents, Export, Manifest, Metrics, Plan, TrainingResult
from flytune.records.comparison import COMPARISON
from flytune.records.contents import CONTENTS, list_files, record
from flytune.records.training import STEPS
from flytune.report import model_card, page, xray

__all__ = ["CONTENTS", "Contents", "publish", "published_name", "store"]

log = logging.getLogger(__name__)

# Pickles run code when they are loaded; the rest is state that only training needs.
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"}
STATE = ("optimizer", "scheduler", "scaler", "rng_state", "trainer_state", "training_args", "global_step", "checkpoint-")
CACHES = {"__pycache__", ".cache", ".git"}


def store(
    recipe: Recipe, plan: Plan, dataset: Path, trained: Path, metrics: Metrics, out: Path, harness: Path | None = None
) -> Path:
    """Assemble the artifact in `out`, a new or empty folder, and return it. Weights are hard-linked if possible.

    `harness` is the folder with the results of the harness's tasks, base.json and tuned.json, if any were run.

    Raises:
        ExportError: `out` is not empty; `trained` has no weights, or has pickles, optimizer state, empty or truncated files.
    """
    if out.exists() and any(out.iterdir()):
        raise ExportError(f"{out}: not empty; an artifact is stored into a new folder")
    weights = _checked_weights(trained)
    manifest = record(Manifest, dataset / "manifest.json")
    training = record(TrainingResult, trained / "training.json")

    out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(weights, out, copy_function=_link, dirs_exist_ok=True)
    if harness:
        shutil.copytree(harness, out / "harness")
    (out / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    for name, made in (("plan", plan), ("manifest", manifest), ("training", training), ("metrics", metrics)):
        made.write(out / f"{name}.json")
    # A lost log must not cost the model; the gate needs the other files to check the artifact again.
    for name in (STEPS, EXPORT, PROBE):
        if (trained / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copy(trained / name, out / name)
    if (dataset / BAD_ROWS).is_file():
        shutil.copy(dataset / BAD_ROWS, out)
    compare(recipe, plan, manifest, training).write(out / COMPARISON)
    records, broken = (recipe, plan, manifest, training, metrics), guards.broken(recipe, metrics)
    (out / "report.html").write_text(page.render(*records, broken=broken, xray=xray.section(dataset)), encoding="utf-8")
    (out / "README.md").write_text(model_card.render(*records, broken=broken), encoding="utf-8")
    Contents(files=list_files(out, label="hashing the artifact")).write(out / CONTENTS)
    return out


def facts(artifact: Path, recipe: Recipe, metrics: Metrics) -> dict[str, str | float | None]:
    """Return a few values that describe an artifact in a catalog."""
    return {
        "version": published_name(artifact, recipe),
        "method": recipe.method.name,
        "base_commit": record(Export, artifact / EXPORT).revision if (artifact / EXPORT).is_file() else None,
        "base_perplexity": metrics.base.perplexity,
        "tuned_perplexity": metrics.tuned.perplexity,
        "loss_difference": metrics.loss_difference,
        "loss_difference_low": metrics.loss_difference_low,
        "loss_difference_high": metrics.loss_difference_high,
    }


def _checked_weights(trained: Path) -> Path:
    """Return `model/` or `adapter/` below `trained`, after a check of its files."""
    found = [trained / name for name in ("model", "adapter") if list((trained / name).glob("*.safetensors"))]
    if len(found) != 1:
        what = "both model/ and adapter/" if found else "neither model/ nor adapter/ with *.safetensors"
        raise ExportError(f"{trained}: has {what}; nothing was stored")
    for path in sorted(path for path in trained.rglob("*") if path.is_file()):
        if reason := _unfit(path, path.relative_to(trained)):
            raise ExportError(f"{path.relative_to(trained)}: {reason}; nothing was stored")
    for index in found[0].glob("*.safetensors.index.json"):
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if missing := sorted(name for name in named if not (found[0] / name).is_file()):
            raise ExportError(f"{found[0].name}/{missing[0]}: listed in {index.name} but missing; nothing was stored")
    return found[0]


def _unfit(path: Path, relative: Path) -> str | None:
    """Return the reason why a file may not be in an artifact; None if it may."""
    if path.suffix in PICKLES:
        return "a pickle; weights are stored as safetensors alone"
    if any(part.startswith(STATE) for part in relative.parts):
        return "training state, which is no part of a model"
    if CACHES.intersection(relative.parts):
        return "a cache"
    if not path.stat().st_size:
        return "empty"
    if path.suffix == ".safetensors" and (expected := _safetensors_size(path)) != path.stat().st_size:
        return f"truncated or damaged: its header says {expected:,} bytes, it has {path.stat().st_size:,}"
    return None


def _safetensors_size(path: Path) -> int:
    """Return the bytes of a safetensors file by its header (8 bytes of length, JSON header, tensors); 0 if it is unreadable."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length) if length < 2**27 else b"")
            return 8 + length + max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError):
            return 0


def _link(source: str, target: str) -> Any:
    """Hard-link weights, gigabytes that nobody edits; copy other files, and weights on another file system."""
    if source.endswith(".safetensors"):
        try:
            return os.link(os.path.realpath(source), target)
        except OSError:
            log.debug("%s: cannot be linked, so it is copied", source)
    return shutil.copy(source, target)
