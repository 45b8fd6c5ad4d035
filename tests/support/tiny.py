"""Smallest model, recipe and data for a complete run, for fixtures."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flytune.selftest import tiny_model
from flytune.selftest.tiny_model import SENTENCES


def tiny_base(folder: Path) -> Path:
    """Write a Llama of about 0.9M random weights and at most 512 tokens below `folder`, in about a second."""
    return tiny_model.write(folder / "tiny", SENTENCES)


def write_pairs(path: Path, n: int) -> Path:
    """Write `n` different instruction/input/output rows as JSON Lines."""
    draw = random.Random(0)
    rows = []
    for index in range(n):
        left, right = draw.randrange(100), draw.randrange(100)
        instruction, output = f"Question {index}: add the numbers.", f"The sum is {left + right}."
        rows.append({"instruction": instruction, "input": f"{left} and {right}", "output": output})
    return write_rows(path, rows)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tiny_recipe(base: Path, data: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a recipe for three full fine-tuning steps on cpu-1, with dotted `changes`:
    {"training.max_steps": 2}."""
    recipe: dict[str, Any] = {
        "name": "tiny",
        "model": {"name_or_path": str(base), "dtype": "float32", "attn_implementation": "sdpa"},
        "data": {"path": str(data), "max_length": 128, "heldout_fraction": 0.2},
        "method": "full",
        "sharding": "none",
        "training": {
            "learning_rate": 1e-3,
            "global_batch_size": 4,
            "max_steps": 3,
            "activation_checkpointing": False,
        },
        "evaluation": {"max_samples": 8, "batch_size": 4, "sample_answers": 1, "max_new_tokens": 8},
        "checkpoints": {"folder": str(base.parent / "checkpoints")},
        "hardware": {"shape": "cpu-1"},
    }
    for path, value in (changes or {}).items():
        *sections, last = path.split(".")
        place = recipe
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return recipe


def cluster_recipe(base: Path, data: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the same for a cluster, whose pods have no folder of this machine: its checkpoints are in its
    storage."""
    return tiny_recipe(base, data, {"checkpoints": {}} | (changes or {}))
