"""Table of model types: a tiny instance of each is packed, trained, exported and reloaded.

    python -m benchmarks.model_types llama mamba      # prints the rows of these types
    python -m benchmarks.model_types --write          # all types, into flytune/models/model_types.json

A type is packable under a kind of attention if packed samples have the losses and gradients of samples alone, and other
neighbors change nothing. It is trained if Flytune's training loop lowers the loss on a CPU, the gate accepts the reloaded
export, and no prediction sees a later token. Slices are right, which fsdp reads, if the weights are those that transformers
loads. FlashAttention is computed by a stand-in for its kernels, which run on GPUs only.
"""

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from flytune.models import model_types
from tests.support import packed_samples, trained_types
from tests.support.model_types import MODEL_TYPES, NOT_BUILT

PAGE, MARKS = Path(__file__).resolve().parents[1] / "docs" / "models.md", ("<!-- model types -->", "<!-- end -->")

_CAUSES = (
    ("has no attribute 'num_experts'", "TRL cannot compute the balance loss of its routers"),
    ("<class 'transformers.models", "AutoModelForCausalLM does not load the configuration that it writes"),
    ("One of the differentiated Tensors does not require grad", "transformers' code of it has no gradients"),
    ("modified by an inplace operation", "transformers' code of it changes tensors that its gradients need"),
    ("all zero, so it was never trained", "all-linear adapts layers that text does not train; name method.target_modules"),
    ("no file named model.safetensors", "transformers writes no safetensors of it"),
)
"""Reasons in plain words, by a part of the error."""


def row(model_type: str, folder: Path) -> dict[str, Any]:
    """Return the row of a model type.

    Args:
        folder: the folder of trained_types.inputs; receives the type's files, which are deleted.
    """
    if model_type in NOT_BUILT:
        return {"packing": [], "problems": dict.fromkeys(("packing", "full", "lora"), f"not tried: {NOT_BUILT[model_type]}")}
    ran = {attention: packed_samples.problem_of(model_type, attention) for attention in packed_samples.ATTENTIONS}
    packing = [attention for attention, found in ran.items() if found is None]
    wrong = [found for found in ran.values() if found and found != packed_samples.NONE_SUCH]
    problems = {"packing": wrong[0]} if wrong else {}
    problems |= _training(model_type, folder)
    if "full" in problems:
        packing, problems = [], problems | {"packing": problems.get("packing", "it is not trained")}
    return {"packing": packing, "problems": dict(sorted(problems.items()))}


def _training(model_type: str, folder: Path) -> dict[str, str]:
    place = folder / model_type
    base = place / "base"
    problems = {}
    try:
        if found := _failure(lambda: trained_types.write_base(model_type, folder / "tokenizer", base)):
            return {"full": found, "lora": found}
        if found := _failure(lambda: trained_types.check_causal(base)):
            return {"full": found, "lora": found}
        data = Path(shutil.copytree(folder / "dataset", place / "dataset"))
        checks: dict[str, Callable[[], Any]] = {
            "slices": lambda: trained_types.check_sharded_loading(base),
            "full": lambda: trained_types.train(base, data, "full", place / "full"),
            "lora": lambda: trained_types.train(base, data, "lora", place / "lora"),
        }
        problems = {name: found for name, check in checks.items() if (found := _failure(check))}
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return problems


def _failure(check: Callable[[], Any]) -> str | None:
    """Return the reason why a check fails; None if it passes."""
    try:
        check()
    except AssertionError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (whatever goes wrong on the way)
        text = " ".join(str(error).split())
        if any(frame.name == "load_balancing_loss_func" for frame in traceback.extract_tb(error.__traceback__)):
            return "TRL cannot compute the balance loss of its routers"
        for part, cause in _CAUSES:
            if part in text:
                return cause
        return f"{type(error).__name__}: {text[:160]}"
    return None


def rows(names: list[str], workers: int) -> dict[str, dict[str, Any]]:
    """Return the rows of model types, computed by several processes."""
    folder = Path(tempfile.mkdtemp(prefix="model-types-"))
    found = {}
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet) as pool:
            pool.submit(trained_types.inputs, folder).result()
            for name, made in zip(names, pool.map(row, names, [folder] * len(names)), strict=True):
                found[name] = made
                print(name, json.dumps(made), flush=True)  # noqa: T201
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def summary() -> str:
    """Return the table's contents as Markdown, for docs/models.md."""
    table = model_types.table()
    tried = {name: row for name, row in table.items() if not row.get("untried")}
    trained = {method: [name for name, row in tried.items() if method not in row["problems"]] for method in ("full", "lora")}
    everywhere = [name for name, row in table.items() if len(row["packing"]) == len(packed_samples.ATTENTIONS)]
    some = [f"{name} ({', '.join(row['packing'])})" for name, row in table.items() if row["packing"] and name not in everywhere]
    parts = [
        f"Trained, full ({len(trained['full'])} of {len(table)}): {', '.join(trained['full'])}.",
        f"Trained, lora and qlora ({len(trained['lora'])}): the same"
        f" without {', '.join(sorted({*trained['full']} - {*trained['lora']})) or 'exception'}.",
        f"Training not tried ({len(table) - len(tried)}): {', '.join(name for name in table if name not in tried) or 'none'}.",
        f"Packed under every kind of attention ({len(everywhere)}): {', '.join(everywhere)}.",
        f"Packed under some ({len(some)}): {'; '.join(some)}.",
    ]
    refused: dict[str, list[str]] = {}
    for name, row in table.items():
        if why := row["problems"].get("full"):
            refused.setdefault(why, []).append(name)
    lines = ["| refused | reason |", "|---|---|", *(f"| {', '.join(names)} | {why} |" for why, names in refused.items())]
    return "\n\n".join([*(textwrap.fill(part, 150, break_on_hyphens=False) for part in parts), "\n".join(lines)])


def _quiet() -> None:
    """Let a worker compute on one core, and print nothing."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sink = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process)
    sys.stdout = sys.stderr = sink


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_types", description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument(
        "--write", action="store_true", help="replace the rows of these types in flytune/models/model_types.json"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    import transformers

    made = rows(given.types or sorted([*MODEL_TYPES, *NOT_BUILT]), given.workers)
    if given.write:
        kept = {}
        with contextlib.suppress(FileNotFoundError):
            kept = json.loads(model_types.FILE.read_text(encoding="utf-8"))["types"] if given.types else {}
        lines = [f'  "{name}": {json.dumps(found)}' for name, found in sorted((kept | made).items())]
        content = [f'{{"transformers": "{transformers.__version__}", "types": {{', ",\n".join(lines), "}}"]
        model_types.FILE.write_text("\n".join([*content, ""]), encoding="utf-8")
        model_types.table.cache_clear()
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.partition(MARKS[0])[0], page.partition(MARKS[1])[2]
        PAGE.write_text(f"{before}{MARKS[0]}\n{summary()}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
