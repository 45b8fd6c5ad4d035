"""Table of model types: a tiny instance of each is packed, trained, exported and reloaded.

    python -m benchmarks.model_types llama mamba      # prints the rows of these types python -m
    benchmarks.model_types --write          # all types, into flytune/models/model_types.json python -m
    benchmarks.model_types --write --training    # the same without packing, which is kept as it is there
    python -m benchmarks.model_types --write --packing    # packing alone; all else is kept as it is there
    python -m benchmarks.model_types --write --experts    # adapters on experts alone; all else is kept as it
    is there

A type is packable under a kind of attention if packed samples have the losses and gradients of samples alone,
and other neighbors change nothing, in float64: what is equal is so to 1e-7, what is not differs by 1e-3 or
more, and a distance between them is an error. It is trained if Flytune's training loop lowers the loss on a
CPU, the gate accepts the reloaded export, and no prediction sees a later token. Slices are right, which fsdp
reads, if the weights are those that transformers loads. FlashAttention is computed by a stand-in for its
kernels, which run on GPUs only. The loss that is trained is compared with the model's own, with every field
of the configuration changed once. Adapters on experts are trained where a type has some, and PEFT alone must
reload and merge the model that was trained. Training has the recipe's defaults (activation checkpointing,
sdpa), as far as the type has them, in float32; products in bfloat16 are tried once.
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
from tests.support import model_losses, packed_samples, trained_types
from tests.support.model_types import NOT_BUILT

PAGE, MARKS = (
    Path(__file__).resolve().parents[1] / "docs" / "models.md",
    ("<!-- model types -->", "<!-- end -->"),
)

_CAUSES = (
    ("has no attribute 'num_experts'", "TRL cannot compute the balance loss of its routers"),
    ("<class 'transformers.models", "AutoModelForCausalLM does not load the configuration that it writes"),
    ("One of the differentiated Tensors does not require grad", "transformers' code of it has no gradients"),
    ("modified by an inplace operation", "transformers' code of it changes tensors that its gradients need"),
    (
        "all zero, so it was never trained",
        "all-linear adapts layers that text does not train; name method.target_modules",
    ),
    ("no file named model.safetensors", "transformers writes no safetensors of it"),
)
"""Reasons in plain words, by a part of the error."""


def row(model_type: str, folder: Path, packed: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the row of a model type.

    Args:
        folder: the folder of trained_types.inputs; receives the type's files, which are deleted.
        packed: an earlier row, whose results of packing are kept; None to run it.
    """
    if model_type in NOT_BUILT:
        return {
            "packing": [],
            "problems": dict.fromkeys(("packing", "full", "lora"), f"not tried: {NOT_BUILT[model_type]}"),
        }
    packed = packed or with_packing(model_type, folder, {"problems": {}})
    packing, problems = (
        packed["packing"],
        {name: why for name, why in packed["problems"].items() if name == "packing"},
    )
    defaults, losses = trained_types.defaults(model_type), dict[str, Any]()
    if found := _failure(lambda: losses.update(model_losses.row(model_type))):
        losses = {"problems": {"loss": found}}
    # The training loop reads them.
    model_types.table()[model_type] = {"packing": packing, "problems": {}} | defaults | losses
    problems |= _training(model_type, folder) | losses.pop("problems", {})
    if "loss" in problems:
        problems["full"] = problems["lora"] = problems.pop("loss")
    if "full" in problems:
        packing, problems = [], problems | {"packing": problems.get("packing", "it is not trained")}
    made = {"packing": packing, "problems": dict(sorted(problems.items()))} | defaults | losses
    return with_experts(model_type, folder, made)


def with_packing(model_type: str, folder: Path, kept: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the results of packing, made anew; as it is where the type is not trained."""
    if "full" in kept["problems"]:
        return kept
    ran = {
        attention: packed_samples.problem_of(model_type, attention) for attention in packed_samples.ATTENTIONS
    }
    wrong = [found for found in ran.values() if found and found != packed_samples.NONE_SUCH]
    problems = {name: why for name, why in kept["problems"].items() if name != "packing"}
    problems |= {"packing": wrong[0]} if wrong else {}
    packing = [attention for attention, found in ran.items() if found is None]
    return kept | {"packing": packing, "problems": dict(sorted(problems.items()))}


def with_experts(model_type: str, folder: Path, kept: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the result of adapters on experts, made anew; without one where the type has no
    adapters at all."""
    row = {name: value for name, value in kept.items() if name != "experts"}
    problems = {name: why for name, why in row["problems"].items() if name != "experts"}
    if "full" in problems:
        return row | {"problems": problems}
    place = folder / model_type
    try:
        base = trained_types.write_base(model_type, folder / "tokenizer", place / "base")
        if not trained_types.has_experts(base):
            return row | {"problems": problems}
        data = Path(shutil.copytree(folder / "dataset", place / "dataset"))
        if "lora" not in problems and (
            found := _failure(lambda: trained_types.check_experts(base, data, place / "experts"))
        ):
            problems["experts"] = found
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return row | {"problems": dict(sorted(problems.items())), "experts": True}


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
            "bfloat16": lambda: trained_types.check_bfloat16(base),
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
        if any(
            frame.name == "load_balancing_loss_func" for frame in traceback.extract_tb(error.__traceback__)
        ):
            return "TRL cannot compute the balance loss of its routers"
        for part, cause in _CAUSES:
            if part in text:
                return cause
        return f"{type(error).__name__}: {text[:160]}"
    return None


def rows(
    names: list[str], workers: int, make: Callable[..., Any], kept: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the rows of model types, computed by several processes.

    Args:
        make: row, with_packing or with_experts.
        kept: the rows that it gets.
    """
    folder = Path(tempfile.mkdtemp(prefix="model-types-"))
    rows = {}
    try:
        with ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet
        ) as pool:
            pool.submit(trained_types.inputs, folder).result()
            for name, made in zip(
                names, pool.map(make, names, [folder] * len(names), map(kept.get, names)), strict=True
            ):
                rows[name] = made
                print(name, json.dumps(made), flush=True)  # noqa: T201
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def _packed() -> dict[str, Any]:
    """Return the rows of the types whose packing was run: those that are trained."""
    return {name: found for name, found in model_types.table().items() if "full" not in found["problems"]}


def summary() -> str:
    """Return the table's contents as Markdown, for docs/models.md."""
    table = model_types.table()
    tried = {name: row for name, row in table.items() if not row.get("untried")}
    trained = {
        method: [name for name, row in tried.items() if method not in row["problems"]]
        for method in ("full", "lora")
    }
    everywhere = [
        name for name, row in table.items() if len(row["packing"]) == len(packed_samples.ATTENTIONS)
    ]
    some = [
        f"{name} ({', '.join(row['packing'])})"
        for name, row in table.items()
        if row["packing"] and name not in everywhere
    ]
    never = [name for name in trained["full"] if not table[name]["packing"]]
    own = [name for name in trained["full"] if not table[name].get("chunked_loss", True)]
    fields, terms = (_by_field(tried, key) for key in ("own_fields", "loss_fields"))
    lacks = [name for name in trained["full"] if not table[name].get("checkpointing", True)]
    eager = [name for name in trained["full"] if "sdpa" not in table[name]["attention"]]
    experts = {name: row["problems"] for name, row in tried.items() if row.get("experts")}
    adapted = [name for name, problems in experts.items() if not {"lora", "experts"} & problems.keys()]
    without = [name for name, problems in experts.items() if "lora" in problems]
    unable = {name: row["problems"]["experts"] for name, row in tried.items() if "experts" in row["problems"]}
    refused_experts = "; ".join(f"{name} ({why})" for name, why in unable.items())
    parts = [
        f"Trained, full: {len(trained['full'])} of {len(table)} types, all but those that the table below "
        "refuses.",
        f"Trained, lora and qlora ({len(trained['lora'])}): the same"
        f" without {', '.join(sorted({*trained['full']} - {*trained['lora']})) or 'exception'}.",
        f"Trained with adapters on experts ({len(adapted)}): {', '.join(adapted)}.",
        f"Refused with adapters on experts ({len(unable)}): {refused_experts or 'none'}.",
        f"With experts, and refused with any adapter ({len(without)}): {', '.join(without) or 'none'}.",
        f"Training not tried ({len(table) - len(tried)}): "
        f"{', '.join(name for name in table if name not in tried) or 'none'}.",
        f"Trained with the loss of their own logits ({len(own)}): {', '.join(own)}.",
        f"The same with some configurations: {fields}.",
        f"Refused with some configurations, for a term of the loss: {terms}.",
        f"Trained with activation_checkpointing: false only ({len(lacks)}): {', '.join(lacks)}.",
        f"Trained without sdpa, the default of attn_implementation ({len(eager)}): {', '.join(eager)}.",
        f"Packed under every kind of attention: the {len(everywhere)} trained types that are in neither of "
        "the next two lists.",
        f"Packed under some ({len(some)}): {'; '.join(some)}.",
        f"Never packed ({len(never)}): {', '.join(never)}.",
    ]
    refused: dict[str, list[str]] = {}
    for name, row in table.items():
        if why := row["problems"].get("full"):
            refused.setdefault(why, []).append(name)
    lines = [
        "| refused | reason |",
        "|---|---|",
        *(f"| {', '.join(names)} | {why} |" for why, names in refused.items()),
    ]
    return "\n\n".join(
        [*(textwrap.fill(part, 150, break_on_hyphens=False) for part in parts), "\n".join(lines)]
    )


def _by_field(table: dict[str, dict[str, Any]], key: str) -> str:
    """Return the types that have fields under a key of their rows, by field and default."""
    types: dict[str, list[str]] = {}
    for name, found in table.items():
        for field, default in found.get(key, {}).items():
            types.setdefault(f"{field} not {json.dumps(default)}", []).append(name)
    return "; ".join(f"{field} ({', '.join(names)})" for field, names in types.items())


def _quiet() -> None:
    """Let a worker compute on one core, and print nothing."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sink = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process)
    sys.stdout = sys.stderr = sink


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.model_types", description=__doc__.splitlines()[0]
    )
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument(
        "--write",
        action="store_true",
        help="replace the rows of these types in flytune/models/model_types.json",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--training", action="store_true", help="keep the results of packing in that file")
    part.add_argument(
        "--packing", action="store_true", help="run packing alone, and keep all else in that file"
    )
    part.add_argument(
        "--experts", action="store_true", help="run adapters on experts alone, and keep all else in that file"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    make = with_packing if given.packing else with_experts if given.experts else row
    known = model_types.table() if given.packing or given.experts else _packed() if given.training else {}
    made = rows(given.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), given.workers, make, known)
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
