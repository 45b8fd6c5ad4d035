"""What must hold: of the ledger after each strike, and of the result at the end. Run in processes of their own."""

import json
import logging
from pathlib import Path
from typing import Any

from flytune import data
from flytune.errors import ExportError
from flytune.export import gate
from flytune.export.folder import trained_folder
from flytune.files import sha256_of
from flytune.recipe.recipe import Recipe
from flytune.records.training import STEPS, TrainingResult
from flytune.storage import Storage
from flytune.training import checkpoints
from flytune.training.checkpoints.ledger import MANIFEST, Ledger
from tests.chaos import pods

COMPARED = ("loss", "grad_norm", "eval_loss", "learning_rate", "tokens")


def broken(address: str, spoiled: set[str]) -> list[str]:
    """What is wrong with checkpoints of the ledger that no fault has spoiled."""
    logging.disable()
    ledger = Ledger(Storage(address), limit=1)
    faults = [(one.folder, ledger.fault(one)) for one in ledger.checkpoints() if one.folder not in spoiled]
    return [f"{folder}: {fault}" for folder, fault in faults if fault]


def left(address: str) -> list[str]:
    """What lies at the address."""
    return Storage(address).names()


def spoil(address: str, how: str, share: float) -> str | None:
    """Damages one file of the newest checkpoint; returns the checkpoint's folder, or None where there is none."""
    storage = Storage(address)
    found = Ledger(storage, limit=1).checkpoints()
    if not found:
        return None
    newest = found[0]
    names = sorted([file.file for file in newest.files if file.size] + [MANIFEST])
    path = storage.path(f"{newest.folder}/{names[int(share * len(names))]}")
    content = bytearray(storage.filesystem.cat_file(path))
    if how == "file missing":
        storage.filesystem.rm(path)
        return newest.folder
    if how == "bit flipped":
        content[int(share * len(content))] ^= 1
    storage.filesystem.pipe_file(path, bytes(content[: len(content) // 2] if how == "file cut" else content))
    return newest.folder


def losses(lines: list[str]) -> list[list[Any]]:
    """What is compared of each line of a steps.jsonl, the step first."""
    rows = [json.loads(line) for line in lines]
    return [[row["step"], *(row.get(name) for name in COMPARED)] for row in rows]


def result(task: Any, folder: Path, recipe: Recipe, dataset: Path) -> dict[str, Any]:
    """Steps, hashes of the weights and the gate's word, of a pod that is over; its checkpoints go then, as storing does it."""
    trained = pods.output(task, folder)
    try:
        exported = gate.check_files(recipe, trained, dataset)
        refused = ""
    except ExportError as error:
        exported, refused = trained_folder(recipe, trained), str(error)
    lines = (trained / STEPS).read_text(encoding="utf-8").splitlines()
    training = TrainingResult.read(trained / "training.json")
    checkpoints.clear(recipe, data.read_manifest(dataset), training)
    return {
        "steps": losses(lines),
        "weights": {path.name: sha256_of(path) for path in sorted(exported.glob("*.safetensors"))},
        "heldout_loss": training.heldout_loss,
        "refused": refused,
        "lines": lines,
    }


def lost(found: dict[str, Any], calm: dict[str, Any]) -> list[str]:
    """How a result differs from the undisturbed run's; nothing where it is the same to the last bit."""
    problems = [f"the gate refuses it: {found['refused']}"] if found["refused"] else []
    steps, expected = [row[0] for row in found["steps"]], [row[0] for row in calm["steps"]]
    if steps != expected:
        problems.append(f"steps {steps}, not {expected}")
    for mine, theirs in zip(found["steps"], calm["steps"], strict=False):
        if mine != theirs:
            problems.append(f"step {theirs[0]}: {mine[1:]}, undisturbed {theirs[1:]}")
    problems += [f"{name}: other weights" for name in calm["weights"] if found["weights"].get(name) != calm["weights"][name]]
    if found["heldout_loss"] != calm["heldout_loss"]:
        problems.append(f"held-out loss {found['heldout_loss']}, undisturbed {calm['heldout_loss']}")
    return problems
