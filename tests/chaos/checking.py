"""Checks of the ledger after each fault, and of the result at the end. They run in subprocesses."""

import json
import logging
from pathlib import Path
from typing import Any

from flytune import data
from flytune.errors import ExportError
from flytune.export import gate, trained_folder
from flytune.files import sha256_of
from flytune.recipe import Recipe
from flytune.records import TrainingResult
from flytune.records.training import STEPS
from flytune.storage import Storage
from flytune.training import checkpoints
from flytune.training.checkpoints.ledger import MANIFEST, Ledger
from tests.chaos import pods

COMPARED = ("loss", "grad_norm", "eval_loss", "learning_rate", "tokens")


def ledger_problems(address: str, damaged: set[str]) -> list[str]:
    """Return the problems of the ledger's checkpoints, except those that a fault has damaged."""
    logging.disable()
    ledger = Ledger(Storage(address), limit=1)
    faults = [
        (checkpoint.folder, ledger.fault(checkpoint))
        for checkpoint in ledger.checkpoints()
        if checkpoint.folder not in damaged
    ]
    return [f"{folder}: {fault}" for folder, fault in faults if fault]


def has_checkpoint(address: str) -> bool:
    """Return whether a run can resume from a checkpoint at the address."""
    ledger = Ledger(Storage(address), limit=1)
    return any(not ledger.fault(checkpoint) for checkpoint in ledger.checkpoints())


def remaining_files(address: str) -> list[str]:
    """Return the names of the files at the address."""
    return Storage(address).names()


def damage(address: str, how: str, share: float) -> str | None:
    """Damage one file of the newest checkpoint; return the checkpoint's folder, or None if there is no
    checkpoint."""
    storage = Storage(address)
    found = Ledger(storage, limit=1).checkpoints()
    if not found:
        return None
    newest = found[0]
    # An earlier fault may have deleted one of its files.
    there = [
        file.file
        for file in newest.files
        if file.size and storage.filesystem.exists(storage.path(f"{newest.folder}/{file.file}"))
    ]
    names = sorted([*there, MANIFEST])
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
    """Return the compared values of each line of a steps.jsonl, the step first."""
    rows = [json.loads(line) for line in lines]
    return [[row["step"], *(row.get(name) for name in COMPARED)] for row in rows]


def result(task: Any, folder: Path, recipe: Recipe, dataset: Path) -> dict[str, Any]:
    """Return steps, hashes of the weights and the gate's verdict of a finished pod; delete its checkpoints,
    as storing does."""
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
        "attempt": training.attempt,
        "weights": {path.name: sha256_of(path) for path in sorted(exported.glob("*.safetensors"))},
        "heldout_loss": training.heldout_loss,
        "refused": refused,
        "lines": lines,
    }


def differences(found: dict[str, Any], undisturbed: dict[str, Any]) -> list[str]:
    """Return the differences of a result from the undisturbed run's; none if they are equal bit for bit."""
    problems = [f"the gate refuses it: {found['refused']}"] if found["refused"] else []
    steps, expected = [row[0] for row in found["steps"]], [row[0] for row in undisturbed["steps"]]
    if steps != expected:
        problems.append(f"steps {steps}, not {expected}")
    for mine, theirs in zip(found["steps"], undisturbed["steps"], strict=False):
        if mine != theirs:
            problems.append(f"step {theirs[0]}: {mine[1:]}, undisturbed {theirs[1:]}")
    problems += [
        f"{name}: other weights"
        for name in undisturbed["weights"]
        if found["weights"].get(name) != undisturbed["weights"][name]
    ]
    if found["heldout_loss"] != undisturbed["heldout_loss"]:
        problems.append(f"held-out loss {found['heldout_loss']}, undisturbed {undisturbed['heldout_loss']}")
    return problems
