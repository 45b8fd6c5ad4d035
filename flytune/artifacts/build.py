"""The artifact: one folder with weights, tokenizer and everything that a rerun needs; stored completely or
not at all."""

import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from flytune import json_core
from flytune.artifacts import identity, lineage
from flytune.artifacts.publish import published_name
from flytune.data import contract
from flytune.data.bad_rows import BAD_ROWS
from flytune.errors import ExportError, StorageError
from flytune.export.folder import MANIFEST as EXPORT
from flytune.files import link_or_copy
from flytune.models import weight_index
from flytune.models.probe import PROBE
from flytune.recipe import Recipe
from flytune.records import Comparison, Contents, Export, Manifest, Metrics, Plan, Step, TrainingResult
from flytune.records.comparison import COMPARISON
from flytune.records.contents import CONTENTS, StoredFile, list_files, record
from flytune.records.lineage import LINEAGE, Lineage
from flytune.records.rollouts import Group
from flytune.records.training import ROLLOUTS, STEPS, highest
from flytune.report import model_card, page, xray
from flytune.report.pictures import Pictures
from flytune.schema import RecordError
from flytune.storage import Storage

log = logging.getLogger(__name__)
# Pickles run code when they are loaded; the rest is state that only training needs.
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"}
STATE = (
    "optimizer",
    "scheduler",
    "scaler",
    "rng_state",
    "trainer_state",
    "training_args",
    "global_step",
    "checkpoint-",
)
WEIGHTS = re.compile(r"(model|adapter)/[^/]+\.safetensors")
"""Name of a file of weights in a trained folder."""
CACHES = {"__pycache__", ".cache", ".git"}
_OUTSIDE = ("CUDA context", "NCCL", "fragmentation")
"""Components of planned GPU memory that torch does not allocate, so that the measured peak does not contain
them."""


def compare_with_plan(recipe: Recipe, plan: Plan, manifest: Manifest, training: TrainingResult) -> Comparison:
    """Return the plan's estimates with the measured values."""
    left_out = _OUTSIDE if plan.memory.resource == "GPU memory" else ()
    planned = {
        phase: sum(size for name, size in table.items() if name not in left_out)
        for phase, table in plan.memory.phases.items()
    }
    peaks, logged = training.peaks, [(training.steps, training.first_step)]
    if training.attempts:
        # An attempt on other machines, or with another micro batch, is not what was planned.
        attempts = [attempt for attempt in training.attempts if attempt.is_of(plan)]
        peaks = highest([attempt.peaks for attempt in attempts])
        logged = [(training.steps_of(attempt), attempt.resumed_from_step) for attempt in attempts]
    steps: list[Step] = []
    count = 0
    for of_attempt, first in logged:
        steady, covered = _steady(of_attempt, first)
        steps += steady
        count += covered
    seconds = sum(step.seconds - step.eval_seconds for step in steps)
    return Comparison(
        recipe=recipe.name,
        shape=plan.shape,
        full_length=recipe.data.packing
        or (recipe.training.probe_longest and manifest.longest >= recipe.data.max_length),
        planned_bytes=planned,
        measured_bytes=peaks,
        planned_step_seconds=sum(plan.step_seconds.values()) or None,
        measured_step_seconds=seconds / count if count else 0.0,
        planned_tokens_per_second=plan.tokens_per_second[1] if plan.tokens_per_second else None,
        measured_tokens_per_second=sum(step.tokens for step in steps) / seconds if seconds > 0 else 0.0,
        calibration=plan.calibration,
    )


def _steady(steps: list[Step], first: int) -> tuple[list[Step], int]:
    """Return the logged steps of an attempt without its first, if there are others, and the number of steps
    that they cover.

    A logged step may cover several; the first one covers those since step `first`.
    """
    if not steps:
        return [], 0
    if len(steps) == 1:
        return steps, steps[0].step - first
    return steps[1:], steps[-1].step - steps[0].step


def store(
    recipe: Recipe,
    plan: Plan,
    dataset: Path,
    trained: Path,
    metrics: Metrics,
    out: Path,
    harness: Path | None = None,
    weights: Storage | None = None,
    broken: Sequence[str] = (),
) -> Path:
    """Assemble the artifact in `out`, a new or empty folder, and return it. Weights are hard-linked if
    possible.

    Args:
        dataset: folder of the prepared data.
        trained: folder of the trained model.
        harness: folder with the results of the harness's tasks, base.json and tuned.json, if any were run.
        weights: storage of all files of `trained`, if the folder lacks the weights. They are checked there,
            listed in artifact.json, and not in `out`: `weight_files` names them.
        broken: a sentence for each failed guard (evaluation.guards.broken), for the report and the card.

    Raises:
        ExportError: `out` is not empty; `trained` has no weights, or has pickles, optimizer state, empty or
            truncated files.
    """
    if out.exists() and any(out.iterdir()):
        raise ExportError(f"{out}: not empty; an artifact is stored into a new folder")
    stored = weights or Storage(trained, "", error=ExportError)
    kind, sizes = _checked_weights(stored, trained)
    manifest = record(Manifest, dataset / "manifest.json")
    training = record(TrainingResult, trained / "training.json")

    out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(trained / kind, out, copy_function=_link, dirs_exist_ok=True)
    if harness:
        shutil.copytree(harness, out / identity.HARNESS)
    _copy_files(dataset, trained, out)
    (out / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    records = (recipe, plan, manifest, training, metrics)
    for name, content in zip(("plan", "manifest", "training", "metrics"), records[1:], strict=True):
        content.write(out / f"{name}.json")
    compare_with_plan(recipe, plan, manifest, training).write(out / COMPARISON)
    before = _lineage(recipe)
    if before is not None:
        before.write(out / LINEAGE)
    stored_contract = contract.stored(dataset)
    report = page.render(
        *records,
        broken=broken,
        lineage=before,
        warnings=[check.sentence for check in stored_contract.faults] if stored_contract else [],
        xray=xray.section(dataset),
        rollouts=_rollouts(recipe, trained / ROLLOUTS),
        pictures=Pictures(dataset).of_prompts(len(metrics.answers), dataset) if recipe.data.images else [],
    )
    (out / "report.html").write_text(report, encoding="utf-8")
    card = model_card.render(*records, broken=broken, lineage=before)
    (out / "README.md").write_text(card, encoding="utf-8")
    files = _files(out, _listed_weights(trained, stored, sizes))
    written = identity.of(recipe, manifest, _base_commit(out), files)
    Contents(files=files, identity=written).write(out / CONTENTS)
    return out


def _copy_files(dataset: Path, trained: Path, out: Path) -> None:
    """Copy the files beside the weights that the data's preparation and the training have left."""
    # A lost log must not cost the model; the gate needs the other files to check the artifact again.
    for name in (STEPS, ROLLOUTS, EXPORT, PROBE):
        if (trained / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copy(trained / name, out / name)
    if (dataset / BAD_ROWS).is_file():
        shutil.copy(dataset / BAD_ROWS, out)


def _files(out: Path, weights: list[StoredFile]) -> list[StoredFile]:
    """Return the files of an artifact with their hashes, those of the weights as they are listed."""
    here = list_files(out, {file.file: file.sha256 for file in weights}, "hashing the artifact")
    elsewhere = [file for file in weights if not (out / file.file).is_file()]
    return sorted([*here, *elsewhere], key=lambda file: file.file)


def _base_commit(artifact: Path) -> str | None:
    return record(Export, artifact / EXPORT).revision if (artifact / EXPORT).is_file() else None


def _rollouts(recipe: Recipe, file: Path) -> list[Group]:
    """Return the answers that a run has drawn and recorded; a damaged record must not cost the trained
    model."""
    if not file.is_file():
        return []
    count = len(recipe.objective.reward_names)
    try:
        groups = [Group.parse(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for group in groups:
            if any(len(completion.rewards) != count for completion in group.completions):
                raise ValueError(f"step {group.step} has another number of rewards than the recipe's {count}")
        return groups
    except (ValueError, RecordError) as error:
        log.warning(
            "%s: %s: the report has no drawn answers: %s",
            recipe.name,
            file.name,
            " ".join(str(error).split())[:200],
        )
        return []


def _lineage(recipe: Recipe) -> Lineage | None:
    """Return the runs that made the base model; an error must not cost the trained model."""
    try:
        return lineage.of_base(recipe.model)
    except (ExportError, StorageError) as error:
        log.warning("%s: lineage.json is left out: %s", recipe.name, error)
        return None


def weight_files(artifact: Path, trained: Storage) -> dict[str, str]:
    """Return the weights that a stored artifact lists and lacks: their names in `trained` by their names in
    the artifact."""
    kind = "adapter" if (artifact / "adapter_config.json").is_file() else "model"
    listed = record(Contents, artifact / CONTENTS).files
    return {file.file: f"{kind}/{file.file}" for file in listed if not (artifact / file.file).is_file()}


def facts(artifact: Path, recipe: Recipe, metrics: Metrics) -> dict[str, str | float | None]:
    """Return a few values that describe an artifact in a catalog."""
    values: dict[str, str | float | None] = {
        "version": published_name(artifact, recipe),
        "method": recipe.method.name,
        "base_commit": _base_commit(artifact),
    }
    if not metrics.figures:
        return values
    first, compared = metrics.figures[0], metrics.compared
    values |= {
        f"base_{first.name}": first.base.value if first.base else None,
        f"tuned_{first.name}": first.tuned.value,
    }
    if (difference := compared.difference) is not None:
        ends = (("", difference.value), ("_low", difference.low), ("_high", difference.high))
        values |= {f"{compared.name}_difference{end}": value for end, value in ends}
    return values


def _checked_weights(stored: Storage, trained: Path) -> tuple[str, dict[str, int]]:
    """Return `model` or `adapter`, the folder with the weights, and the size of each file, after a check of
    all files."""
    sizes = stored.sizes("")
    kinds = {name.partition("/")[0] for name in sizes if WEIGHTS.fullmatch(name)}
    if len(kinds) != 1:
        what = "both model/ and adapter/" if kinds else "neither model/ nor adapter/ with *.safetensors"
        raise ExportError(f"{trained}: has {what}; nothing was stored")
    kind = kinds.pop()
    for name in sorted(sizes):
        if reason := _unfit(stored, name, sizes[name]):
            raise ExportError(f"{name}: {reason}; nothing was stored")
    for index in [
        name for name in sizes if name.startswith(f"{kind}/") and name.endswith(".safetensors.index.json")
    ]:
        try:
            named = set(weight_index.weight_map(stored.read(index)).values())
        except weight_index.IndexRefused as error:
            raise ExportError(f"{index}: {error}; nothing was stored") from None
        if missing := sorted(name for name in named if f"{kind}/{name}" not in sizes):
            raise ExportError(
                f"{kind}/{missing[0]}: listed in {index.partition('/')[2]} but missing; nothing was stored"
            )
    return kind, sizes


def _unfit(stored: Storage, name: str, size: int) -> str | None:
    """Return the reason why a file may not be in an artifact; None if it may."""
    path = PurePosixPath(name)
    if path.suffix in PICKLES:
        return "a pickle; weights are stored as safetensors alone"
    if any(part.startswith(STATE) for part in path.parts):
        return "training state, which is not part of a model"
    if CACHES.intersection(path.parts):
        return "a cache"
    if not size:
        return "empty"
    if path.suffix == ".safetensors" and (expected := _safetensors_size(stored, name)) != size:
        return f"truncated or damaged: its header says {expected:,} bytes, it has {size:,}"
    return None


def _safetensors_size(stored: Storage, name: str) -> int:
    """Return the bytes of a safetensors file by its header (8 bytes of length, JSON header, tensors); 0 if it
    is unreadable."""
    length = int.from_bytes(stored.read_part(name, 0, 8), "little")
    try:
        header = json_core.load_object(
            stored.read_part(name, 8, 8 + length) if length < 2**27 else b"", 2**27
        )
        return (
            8
            + length
            + max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return 0


def _listed_weights(trained: Path, stored: Storage, sizes: dict[str, int]) -> list[StoredFile]:
    """Return the files of weights with their hashes: those of export.json, which the gate has compared;
    others are read."""
    listed = record(Export, trained / EXPORT).files if (trained / EXPORT).is_file() else []
    known, weight_files = {file.file: file for file in listed}, []
    for path, size in sorted(sizes.items()):
        if not WEIGHTS.fullmatch(path):
            continue
        name = path.partition("/")[2]
        if (file := known.get(name)) is None:
            file = StoredFile(file=name, size=size, sha256=stored.get(path))
        if file.size != size:
            raise ExportError(f"{path}: has {size:,} bytes, {file.size:,} by {EXPORT}; nothing was stored")
        weight_files.append(file)
    return weight_files


def _link(source: str, target: str) -> None:
    """Link weights, gigabytes that nobody edits; copy other files."""
    if source.endswith(".safetensors"):
        link_or_copy(Path(source), Path(target))
    else:
        shutil.copy(source, target)
