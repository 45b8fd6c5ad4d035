"""Artifacts of Flytune, read by another version of transformers: equal logits and equal tokens.

`python -m benchmarks.serving --python ENVIRONMENT/bin/python` has the transformers of that environment write
a tiny base of each of seven families; trains on each a complete model, an adapter, which is merged, and a
reward model; and reads all of them with both versions. Such an environment: `uv venv ENVIRONMENT && uv pip
install --python ENVIRONMENT/bin/python transformers==4.57.6 torch safetensors`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import serving_reader
from flytune import data
from flytune.adapters import merging
from flytune.artifacts import build
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.selftest import processes
from flytune.training import loop
from tests.support.preferences import write_preferences
from tests.support.reports import metrics
from tests.support.tiny import tiny_recipe, write_pairs

KINDS = ("full", "merged", "reward")
NO_CLASSIFIER = ("gpt_neox",)
"""Families without a sequence classifier of the form that a reward model needs."""
BOUND = 1e-5
"""Largest difference of two logits that counts as none: versions sum in another order."""


def main() -> None:
    """Write, train and read; exit with 1 if the versions differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="interpreter of an environment with another version of transformers")
    parser.add_argument("--folder", type=Path, help="keep bases and artifacts in this new folder")
    given = parser.parse_args()
    if given.python is None:
        Console().print("left out; give --python ENVIRONMENT/bin/python", highlight=False)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        artifacts, reader = folder / "artifacts", serving_reader.__file__
        subprocess.run([given.python, reader, "write", str(folder / "bases")], check=True)
        for family in serving_reader.FAMILIES:
            for kind in KINDS[: 2 if family in NO_CLASSIFIER else 3]:
                _train(
                    folder / "bases" / family,
                    kind,
                    folder / "work" / f"{family}-{kind}",
                    artifacts / f"{family}-{kind}",
                )
        for number, python in enumerate((given.python, sys.executable)):
            subprocess.run(
                [python, reader, "read", str(artifacts), str(folder / f"{number}.json")], check=True
            )
        other, own = (json.loads((folder / f"{number}.json").read_text()) for number in range(2))
    failed = _show(other, own)
    if failed:
        raise SystemExit(f"differ: {', '.join(failed)}")


def _train(base: Path, kind: str, work: Path, out: Path) -> None:
    """Train, export and store one artifact; merge it if it is an adapter."""
    work.mkdir(parents=True)
    changes: dict[str, Any] = {"training.max_steps": 2, "training.warmup_steps": 0}
    changes |= {
        "data.chat_template": "chatml",
        "method": "lora" if kind == "merged" else "full",
        "checkpoints.folder": str(work / "checkpoints"),
    }
    rows = write_pairs(work / "rows.jsonl", 64)
    if kind == "reward":
        rows = write_preferences(work / "rows.jsonl", 64)
        changes |= {"objective": "reward"}
    recipe = Recipe.model_validate(tiny_recipe(base, rows, changes))
    plan = planner.make(recipe)
    data.prepare(DataRequest.of(recipe, "x"), work / "dataset")
    processes.run(1, _fit, recipe, plan, work / "dataset", work / "trained", log=work / "log.txt")
    artifact = work / "artifact" if kind == "merged" else out
    build.store(recipe, plan, work / "dataset", work / "trained", metrics(), artifact)
    if kind == "merged":
        # Not in this process, which would start threads that the next forked one lacks.
        processes.run(1, _merge, artifact, out, log=work / "log.txt")


def _fit(recipe: Recipe, plan: Any, dataset: Path, out: Path) -> None:
    loop.fit(recipe, plan, shape_named(plan.shape), dataset, out)


def _merge(artifact: Path, out: Path) -> None:
    merging.merge(artifact, out)


def _show(other: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Show the table; return the names of what differs."""
    table = Table("artifact", "tokens", "largest difference of logits")
    failed = []
    for name in sorted(own.keys() - {"version"}):
        errors = [one[name]["error"] for one in (other, own) if "error" in one[name]]
        if errors:
            table.add_row(name, "", errors[0])
            failed.append(name)
            continue
        is_equal = other[name]["tokens"] == own[name]["tokens"]
        difference = max(
            abs(one - two) for one, two in zip(other[name]["logits"], own[name]["logits"], strict=True)
        )
        table.add_row(name, "equal" if is_equal else "differ", f"{difference:.1e}")
        if not is_equal or not difference <= BOUND:
            failed.append(name)
    table.title = f"transformers {other['version']} and {own['version']}"
    Console().print(table)
    return failed


if __name__ == "__main__":
    main()
