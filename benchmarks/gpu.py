"""Plan compared with measured memory and speed, on this machine's first GPU; and the same work by TRL's own
command.

Models have the shapes of published ones and random weights, and every sample has exactly data.max_length
tokens. Two tables: each case's peak of training as torch allocates and reserves it, and its tokens a second,
beside the plan's figures, with the distance of its export from the live model (flytune/export/gate.py); and
Flytune beside `trl sft` with the same model, data and settings, each in a process of its own: memory, tokens
a second, seconds to the first step.

`--out DIR` keeps a JSON file for each case: recipe, plan, steps, peaks by phase. Without a GPU nothing is
measured.
"""

import argparse
import fcntl
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from flytune.files import ROOT
from flytune.hardware.shapes import GIB
from flytune.selftest import tiny_model
from tests.support import prompts

LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0}
MODELS = {
    "tiny": LLAMA
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    },
    "135M": LLAMA
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "1B": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "3B": LLAMA
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
    "8B": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""config.json of SmolLM2-135M, Llama-3.2-1B and 3B, Llama-3.1-8B, without their RoPE scaling; tiny is for a
trial."""
STEPS = 8
WARM = 2
"""First steps that are not timed: kernels are chosen and compiled in them."""
LOCK = "FLYTUNE_BENCHMARK_LOCK"


class Case(NamedTuple):
    """A run to be measured."""

    model: str
    method: str
    length: int
    micro: int
    changes: Mapping[str, Any] = MappingProxyType({})

    @property
    def name(self) -> str:
        """Name for tables and files."""
        words = (
            value["name"] if key == "objective" else key.rpartition(".")[2]
            for key, value in self.changes.items()
        )
        extra = "".join(f"-{word}" for word in words)
        return f"{self.model}-{self.method}-{self.length}x{self.micro}{extra}"


BF16 = {"training.master_dtype": "bfloat16"}
GRPO = {"objective": prompts.section(group_size=8, max_completion_length=128, eval_answers=0)}
"""A model of random weights seldom ends an answer before the longest."""
DPO = {"objective": {"name": "dpo"}}
CASES = [
    Case("135M", "full", 1024, 8),
    Case("135M", "lora", 1024, 8),
    Case("135M", "qlora", 1024, 8),
    Case("1B", "full", 2048, 4),
    Case("1B", "full", 8192, 1),
    Case("1B", "full", 2048, 4, BF16),
    Case("1B", "lora", 2048, 4),
    Case("1B", "qlora", 2048, 4),
    Case("3B", "full", 2048, 2),
    Case("3B", "lora", 8192, 1),
    Case("3B", "qlora", 2048, 4),
    Case("8B", "lora", 2048, 4),
    Case("8B", "qlora", 2048, 4),
    Case("8B", "lora", 8192, 1),
    Case("8B", "full", 2048, 1, BF16),
    Case("1B", "full", 2048, 4, {"training.use_liger_kernel": True}),
    Case("1B", "full", 2048, 4, {"training.torch_compile": True}),
    Case("1B", "full", 2048, 4, {"training.activation_checkpointing": False}),
    Case("1B", "lora", 1024, 4, DPO),
    Case("1B", "full", 1024, 4, DPO),
    Case("1B", "lora", 512, 16, GRPO),
    Case("8B", "lora", 512, 16, GRPO),
]
PEERS = [Case("1B", "full", 2048, 4), Case("1B", "lora", 2048, 4), Case("3B", "qlora", 2048, 4)]


def main() -> None:
    """Measure the cases that are named, all by default, and show the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model only, also without a GPU: to see that it works"
    )
    parser.add_argument(
        "--cases", help="only cases whose names contain one of these words, separated by commas; - for none"
    )
    parser.add_argument("--peers", help="the same for the cases that TRL runs too")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no case after so many seconds"
    )
    parser.add_argument(
        "--lock", type=Path, help="a file that commands beside each other lock while they train"
    )
    parser.add_argument("--out", type=Path, help="folder for a JSON file of each case")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    # Read from the driver's library: a process that has started CUDA cannot be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if given.alone:
        _alone(given.alone)
        return
    if given.lock:
        os.environ[LOCK] = str(given.lock)
    shape, ends = _shape(), time.monotonic() + given.seconds
    if not shape.is_gpu and not given.quick:
        Console().print("No GPU here: nothing is measured (--quick tries the commands with a tiny model).")
        return
    cases, peers = CASES, PEERS
    if given.quick:
        cases = peers = [Case("tiny", method, 128, 2) for method in ("full", "lora", "qlora")]
        cases = [*cases, Case("tiny", "full", 128, 2, DPO), Case("tiny", "lora", 192, 8, GRPO)]
    with tempfile.TemporaryDirectory(prefix="flytune-gpu-") as folder:
        out = given.out or Path(folder, "out")
        out.mkdir(parents=True, exist_ok=True)
        _show_cases(list(_measure_all(_named(cases, given.cases), shape, Path(folder), out, ends)), shape)
        _show_peers(list(_compare_all(_named(peers, given.peers), shape, Path(folder), out, ends)), shape)


def _named(cases: list[Case], words: str | None) -> list[Case]:
    return [
        case
        for case in cases
        if words is None or (words != "-" and any(word in case.name for word in words.split(",")))
    ]


def _shape() -> Any:
    """Return a row for this machine's first GPU; for a CPU without one."""
    from flytune.hardware import Shape, this_machine

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    cpu = {
        "name": "here",
        "accelerator": "cpu",
        "processes": 1,
        "cpu": os.cpu_count() or 1,
        "memory_gib": 100,
    }
    return this_machine.row("here") or Shape(**cpu, shared_memory_gib=2, disk_gib=60, price_per_hour=0.0)


def _measure_all(
    cases: list[Case], shape: Any, folder: Path, out: Path, ends: float
) -> Iterator[dict[str, Any]]:
    from flytune.selftest import processes

    for number, case in enumerate(cases):
        if time.monotonic() > ends:
            _say(f"not measured, for lack of time: {', '.join(case.name for case in cases[number:])}")
            return
        try:
            work = _work(case, shape, folder, "measured")
            _prepare(work[0], work[2])
            found = processes.run(1, _measured, *work)
        except Exception as error:  # noqa: BLE001 (the other cases are measured all the same)
            _say(f"{case.name}: {type(error).__name__}: {str(error)[-3000:]}")
            continue
        found |= {"case": case.name, "recipe": work[0].model_dump(mode="json", exclude_defaults=True)}
        (out / f"{case.name}.json").write_text(json.dumps(found), encoding="utf-8")
        shutil.rmtree(work[3])
        _say(_line(found))
        yield found


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201


def _line(found: dict[str, Any]) -> str:
    plan, peak = (
        found["planned"],
        max(found["peaks"].get(phase, 0) for phase in ("first step", "steady step")),
    )
    return (
        f"{found['case']}: allocated {peak / GIB:.2f} GiB (planned {plan['allocated'] / GIB:.2f}), "
        f"{found['tokens_per_second']:,.0f} tokens/s (planned {plan['tokens_per_second'] or 0:,.0f}), "
        f"gate {found['distance']:.1e}, {found['loss_difference']:.1e}; {found['seconds']:.0f} s"
    )


def _work(case: Case, shape: Any, folder: Path, run: str) -> tuple[Any, ...]:
    """Return what run `run` of a case needs: recipe, shape, a folder for the prepared data set and one for
    the output."""
    from flytune.recipe import Recipe
    from tests.support.tiny import tiny_recipe

    base, rows = _base(case.model, folder), _rows(case, folder)
    changes = {
        "name": case.name.lower().replace("_", "-"),
        "model.dtype": "bfloat16" if shape.is_gpu else "float32",
        "data": {"path": str(rows), "max_length": case.length, "heldout_fraction": 0.2},
        "method": case.method if case.method == "full" else {"name": case.method, "lora_dropout": 0.0},
        "sharding": "device_map" if case.method == "qlora" else "none",
        "training.learning_rate": 1e-5,
        "training.global_batch_size": case.micro,
        "training.per_device_train_batch_size": case.micro,
        "training.max_steps": STEPS,
        "training.activation_checkpointing": True,
        "checkpoints": {"folder": str(folder / "checkpoints" / run)},
        "hardware.shape": "here",
    }
    recipe = Recipe.model_validate(tiny_recipe(base, rows, changes | dict(case.changes)))
    return recipe, shape, folder / "datasets" / run / case.name, folder / "trained" / run / case.name


def _prepare(recipe: Any, dataset: Path) -> None:
    from flytune import data
    from flytune.recipe import DataRequest

    data.prepare(DataRequest.of(recipe, "benchmark"), dataset)


def _base(model: str, folder: Path) -> Path:
    """Write a base model of random weights, on the GPU's side where there is one, and return its folder."""
    from flytune.selftest import processes

    base = folder / "models" / model
    if not (base / "config.json").exists():
        processes.run(1, _draw, MODELS[model], base)
        tiny_model.train_tokenizer(tiny_model.SENTENCES, 512).save_pretrained(base)
    return base


def _draw(config: dict[str, Any], base: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**config, max_position_embeddings=8192, pad_token_id=3, eos_token_id=2)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).save_pretrained(base)


def _rows(case: Case, folder: Path) -> Path:
    """Write chats of exactly `length` tokens, and return the file: for dpo, pairs of them; for grpo, prompts
    that leave room for an answer. Each digit is a token of the tokenizer."""
    objective = case.changes.get("objective", {"name": "sft"})
    file = folder / "data" / f"{objective['name']}-{case.length}x{case.micro}" / "train.jsonl"
    if file.exists():
        return file
    file.parent.mkdir(parents=True)
    tokenizer, draw = tiny_model.train_tokenizer(tiny_model.SENTENCES, 512), random.Random(0)

    def digits(n: int) -> str:
        return "".join(draw.choices("0123456789", k=n))

    def chat(n: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": digits(8)}, {"role": "assistant", "content": digits(n)}]

    def row(n: int) -> dict[str, Any]:
        if objective["name"] == "grpo":
            return {
                "prompt": [{"role": "user", "content": digits(n - objective["max_completion_length"])}],
                "answer": "1",
            }
        if objective["name"] == "dpo":
            return {"prompt": chat(n)[:1], "chosen": chat(n)[1:], "rejected": chat(n)[1:]}
        return {"messages": chat(n)}

    around = len(tokenizer.apply_chat_template(chat(0), return_dict=False))
    with file.open("w", encoding="utf-8") as stream:
        for _ in range(2 * STEPS * case.micro):
            stream.write(json.dumps(row(case.length - around)) + "\n")
    return file


def _measured(recipe: Any, shape: Any, dataset: Path, out: Path) -> dict[str, Any]:
    """Train, export and check, and return the figures."""
    import torch

    from flytune.data import heldout_rows
    from flytune.errors import ExportError
    from flytune.export import gate
    from flytune.models import heads, loading, probe, scoring
    from flytune.planning import planner
    from flytune.training import loop

    began, lock = time.monotonic(), None
    if os.environ.get(LOCK):
        lock = _train_alone(Path(os.environ[LOCK]))
    plan = planner.make(recipe, [shape])
    result = loop.fit(recipe, plan, shape, dataset, out)
    trained = time.monotonic() - began
    if lock is not None:
        fcntl.flock(
            lock, fcntl.LOCK_SH
        )  # until this process ends: nobody trains meanwhile, and others may check their exports
    gc.collect()
    rows = heldout_rows(dataset, scoring.GATE_SAMPLES)
    place = {"device_map": {"": 0}} if torch.cuda.is_available() else {}
    model, refused = None, None
    try:
        model = gate.check(recipe, out, dataset, rows, lambda: loading.exported_model(recipe, out, **place))
    except ExportError as error:
        refused = str(error)
        model = loading.exported_model(recipe, out, **place)
    live = probe.Answers.read(out / probe.PROBE)
    with gate.arithmetic_of_training(recipe, model):
        found = probe.ask(model, live.prompts)
        heldout = None
        if result.heldout_loss is not None and rows:
            heldout = heads.head_of(recipe).loss(model, scoring.sequences_of(rows), 0, recipe)
    steps = [step.model_dump(mode="json") for step in result.steps]
    seconds = [
        (step.seconds - step.eval_seconds) / step.tokens for step in result.steps[WARM:] or result.steps
    ]
    return {
        "planned": _planned(plan),
        "peaks": result.peaks,
        "reserved_peaks": result.reserved_peaks,
        "steps": steps,
        "tokens_per_second": 1 / statistics.median(seconds),
        "distance": float(probe.distance(live.logits, found.logits).max()),
        "loss_difference": float((found.loss - live.loss).mean().abs()),
        "heldout_difference": abs(float(heldout) - float(result.heldout_loss))
        if heldout is not None
        else None,
        "gate": refused,
        "trained_seconds": trained,
        "seconds": time.monotonic() - began,
    }


def _train_alone(file: Path) -> IO[str]:
    """Have the next Trainer of this process hold a lock from its first step to its last one; return the
    lock's file."""
    from transformers import TrainerCallback, trainer

    lock = file.open("w")

    class Lock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            fcntl.flock(lock, fcntl.LOCK_EX)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            fcntl.flock(lock, fcntl.LOCK_UN)

    trainer.DEFAULT_CALLBACKS.append(Lock())
    return lock


def _planned(plan: Any) -> dict[str, Any]:
    allocated, reserved = plan.intervals.get("allocated_bytes"), plan.intervals.get("reserved_bytes")
    return {
        "allocated": allocated.value if allocated else plan.memory.peak_bytes,
        "reserved": reserved.value if reserved else plan.memory.peak_bytes,
        "tokens_per_second": plan.tokens_per_second[1] if plan.tokens_per_second else None,
        "phases": plan.memory.phases,
        "step_seconds": plan.step_seconds,
    }


def _compare_all(
    cases: list[Case], shape: Any, folder: Path, out: Path, ends: float
) -> Iterator[dict[str, Any]]:
    for number, case in enumerate(cases):
        if time.monotonic() > ends:
            _say(f"not compared, for lack of time: {', '.join(case.name for case in cases[number:])}")
            return
        recipe = _work(case, shape, folder, "compared")[0]
        job, ours, theirs = (
            folder / "job.json",
            out / f"{case.name}-flytune.json",
            out / f"{case.name}-trl.json",
        )
        job.write_text(
            json.dumps([[*case[:4], dict(case.changes)], str(folder), str(ours)]), encoding="utf-8"
        )
        commands = [
            [sys.executable, "-m", "benchmarks.gpu", "--alone", str(job)],
            [
                sys.executable,
                "-m",
                "benchmarks.trl_command",
                str(theirs),
                *_trl_options(recipe, folder / "trl" / case.name),
            ],
        ]
        for command in commands:
            with open(os.environ.get(LOCK) or os.devnull) as lock:
                if os.environ.get(LOCK):
                    fcntl.flock(lock, fcntl.LOCK_EX)
                done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                _say(
                    f"{case.name}: {' '.join(command[2:4])} ended with {done.returncode}: "
                    f"{done.stderr[-2000:]}"
                )
        if ours.exists() and theirs.exists():
            sides = {
                side: json.loads(file.read_text(encoding="utf-8"))
                for side, file in (("flytune", ours), ("trl", theirs))
            }
            yield {"case": case, **sides}


def _trl_options(recipe: Any, out: Path) -> list[str]:
    """Return the options with which `trl sft` does what the recipe says."""
    training, method = recipe.training, recipe.method
    options = {
        "model_name_or_path": recipe.model.name_or_path,
        "dataset_name": str(Path(recipe.data.path).parent),
        "output_dir": str(out),
        "dtype": training.master_dtype if method.name == "full" else recipe.model.dtype,
        "attn_implementation": "sdpa",
        "bf16": recipe.model.dtype == "bfloat16",
        "use_cpu": recipe.model.dtype == "float32",
        "max_length": recipe.data.max_length,
        "max_steps": training.max_steps,
        "per_device_train_batch_size": training.global_batch_size,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler_type,
        "optim": "paged_adamw_8bit" if method.name == "qlora" else "adamw_torch_fused",
        "gradient_checkpointing": training.activation_checkpointing,
        "assistant_only_loss": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
    }
    if method.name != "full":
        options |= {
            "use_peft": True,
            "lora_r": method.r,
            "lora_alpha": method.lora_alpha,
            "lora_dropout": 0.0,
        }
        options |= {"lora_target_modules": "all-linear"}
    if method.name == "qlora":
        options |= {
            "load_in_4bit": True,
            "use_bnb_nested_quant": method.bnb_4bit_use_double_quant,
            "bnb_4bit_quant_type": "nf4",
        }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _alone(job: Path) -> None:
    """Run one case from its data to its last step in this process, and write the time and memory of each
    step."""
    from benchmarks import trl_command

    case, folder, file = json.loads(job.read_text(encoding="utf-8"))
    trl_command.measure_steps(Path(file))
    from flytune.planning import planner
    from flytune.training import loop

    recipe, shape, dataset, out = _work(Case(*case), _shape(), Path(folder), "compared")
    _prepare(recipe, dataset)
    loop.fit(recipe, planner.make(recipe, [shape]), shape, dataset, out)


def _show_cases(found: list[dict[str, Any]], shape: Any) -> None:
    table = Table(title=f"Plan and measured, {shape.accelerator}: GiB, tokens a second", title_justify="left")
    for column in (
        "case",
        "allocated",
        "planned",
        "ratio",
        "reserved",
        "planned",
        "tokens/s",
        "planned",
        "ratio",
        "gate",
    ):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in found:
        plan, phases = row["planned"], ("first step", "steady step")
        allocated = max(row["peaks"].get(phase, 0) for phase in phases)
        reserved = max(row["reserved_peaks"].get(phase, 0) for phase in phases)
        speed, planned = row["tokens_per_second"], plan["tokens_per_second"] or 0
        table.add_row(
            row["case"],
            f"{allocated / GIB:.2f}",
            f"{plan['allocated'] / GIB:.2f}",
            f"{allocated / plan['allocated']:.3f}",
            f"{reserved / GIB:.2f}",
            f"{plan['reserved'] / GIB:.2f}",
            f"{speed:,.0f}",
            f"{planned:,.0f}",
            f"{speed / planned:.2f}" if planned else "",
            f"{row['distance']:.1e}" + (" refused" if row["gate"] else ""),
        )
    Console(width=150).print(table)


def _show_peers(found: list[dict[str, Any]], shape: Any) -> None:
    table = Table(title=f"Flytune and `trl sft`, {shape.accelerator}", title_justify="left")
    for column in (
        "case",
        "first step, s",
        "TRL",
        "step, s",
        "TRL",
        "ratio",
        "allocated, GiB",
        "TRL",
        "reserved, GiB",
        "TRL",
    ):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in found:
        ours, theirs = row["flytune"], row["trl"]
        cells = [row["case"].name, *(f"{side[0]['seconds']:.1f}" for side in (ours, theirs))]
        each = [
            (side[-1]["seconds"] - side[WARM - 1]["seconds"]) / (len(side) - WARM) for side in (ours, theirs)
        ]
        cells += [*(f"{seconds:.3f}" for seconds in each), f"{each[0] / each[1]:.2f}"]
        for kind in ("allocated", "reserved"):
            cells += [f"{max(step.get(kind, 0) for step in side) / GIB:.2f}" for side in (ours, theirs)]
        table.add_row(*cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
