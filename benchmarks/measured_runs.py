"""A table of published measurements of training runs, read into workloads with what was measured of each.

measurements.csv has a row a run, with the source and the quoted figure; other tables need the same columns.
Memory is in GiB: figures that a source prints in 1e9 bytes, or summed over its GPUs, were converted when the
table was made. Sizes of its models are those of their config.json, in measured_models.json, among those that
Flytune ships, or in a folder that is named (`use_models`); they must give the table's parameter count. A row
of a model or a setting that is not known, or with a cell that cannot be read, is left out by name, and the
others are read.
"""

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks import frameworks, published_models
from benchmarks.frameworks import LAYOUTS
from flytune.errors import DataError
from flytune.models.config_json import shipped
from training_estimates import Framework, Optimizer, Workload
from training_estimates.accelerators import workspace_bytes
from training_estimates.errors import SizesError
from training_estimates.layout import Layout
from training_estimates.sizes import Geometry

TABLE = Path(__file__).with_name("measurements.csv")
"""508 published measurements; quality A: fully specified, B: mostly, C: with gaps."""
MODELS = Path(__file__).with_name("measured_models.json")
NAMED_ROWS = 5
"""Rows that are named for each reason why rows are left out."""
PARAMETERS_MAY_DIFFER = 0.005
"""Largest difference from the table's parameter count, as a share."""

FRAMEWORKS: dict[str, Framework] = {
    "fms-acceleration": frameworks.TRANSFORMERS_4_45,
    "QwenLM/Qwen README": frameworks.TRANSFORMERS_4_45,
    "ms-swift 2.x Benchmark.md": frameworks.TRANSFORMERS_4_45,
    "litgpt resource-tables": frameworks.LITGPT,
    "litgpt config_hub": frameworks.LITGPT,
    "torchtune README": frameworks.TORCHTUNE,
    "llm-foundry benchmarking": frameworks.COMPOSER,
    "AnswerDotAI/fsdp_qlora": frameworks.FSDP_QLORA,
    "LambdaLabs distributed-training-guide": frameworks.TORCH,
    "huggingface/peft docs": frameworks.TRANSFORMERS_4_45,
    "HF blog ram-efficient-pytorch-fsdp": frameworks.TRANSFORMERS_4_45,
    "HF blog deepspeed-to-fsdp-and-back": frameworks.TRANSFORMERS_4_45,
}
"""Framework of each source; of other sources it is known by the words of the column `framework`."""
FRAMEWORK_WORDS: list[tuple[str, Framework]] = [
    (r"litgpt", frameworks.LITGPT),
    (r"torchtune", frameworks.TORCHTUNE),
    (r"llm-foundry|composer", frameworks.COMPOSER),
    (r"fsdp_qlora", frameworks.FSDP_QLORA),
    (r"plain pytorch", frameworks.TORCH),
    (
        r"\bhf\b|transformers|sfttrainer|\btrl\b|\bpeft\b|axolotl|llama-?factory|swift",
        frameworks.TRANSFORMERS_4_45,
    ),
]
"""Words of the column `framework` (regular expressions), and the framework that they name; the first that is
found counts."""
_RELEASE = re.compile(r"(?:tf|transformers)[ =]*(\d+)\.(\d+)")
NEW_LOSS = (4, 46)
"""First release of transformers with another loss (frameworks.HF)."""
ON_THE_DEVICE = ("nvidia-smi",)
"""Words of metric_mem for reserved figures of the driver, which include CUDA's context."""
DEVICE_GIB = {
    "A100-80": 79.2,
    "A100-40": 39.4,
    "H100-80": 79.2,
    "A10G-24": 22.1,
    "RTX3090": 23.7,
    "RTX4090": 23.6,
}
"""GPU -> GiB that the driver offers (torch's total_memory), where the table has the nominal size."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SHARDING = {name: name for name in LAYOUTS}
_SHARDING |= {"fsdp1-grad_op": "fsdp1_grad_op", "fsdp2-grad_op": "fsdp2_grad_op", "": "none"}
_PRECISIONS = {
    "": "pure",
    "none": "pure",
    "bf16": "autocast",
    "amp_bf16/DEFAULT": "policy",
    "bf16/PURE": "policy",
}
_QUANTIZATION = {"": "none", "nf4": "nf4", "nf4-dq": "nf4_double", "gptq4": "gptq4"}
_CHECKPOINTING = {"": "none", "none": "none", "full": "full", "full+offload": "offloaded"}
_LOSSES = {
    "hf": "hf",
    "foak_fast": "foak",
    "liger_fused": "liger",
    "litgpt_chunked": "chunked",
    "fp32_logits": "fp32_logits",
}
_LOSSES |= {"chunked": "chunked", "": "hf"}
_ATTENTION = {"fa2": "flash", "fa2(triton)": "flash", "fa3": "flash", "eager": "eager"}
_ATTENTION |= dict.fromkeys(("sdpa", "sdpa/fa2", "sdpa_or_eager", ""), "sdpa")
_METHODS = {name: name for name in ("full", "lora", "qlora", "load")}
_OFFLOADS = {"": "none", "none": "none", "cpu": "cpu", "nvme": "nvme"}
_TARGETS = {name: name for name in ("q", "k", "v", "o", "gate", "up", "down")} | {
    "emb": "embedding",
    "head": "head",
}
_OUTCOMES = {"ok": "ok", "oom": "oom"}
_COLUMN_NAMES = """
    id quality source quote framework model params_b method lora_r lora_targets quant sharding offload nodes
    n_gpu gpu gpu_gib weight_dtype mixed optimizer seq_len micro_batch grad_accum act_ckpt attn ce_kernel
    compile outcome metric_mem peak_alloc_gib peak_reserved_gib mem_note tok_s_gpu step_time_s other notes
    """
_COLUMNS = tuple(_COLUMN_NAMES.split())


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One row: what was run, and what was measured of it. Memory is that of the fullest GPU."""

    row: str
    source: str
    quality: str
    """A: fully specified; B: mostly; C: with gaps."""
    model: str
    workload: Workload | None
    """None for a row without batch sizes: it measured loading, or does not state them."""
    gpu: str
    gpu_memory_gib: float | None
    allocated_gib: float | None
    reserved_gib: float | None
    reserved_on_device: bool
    """True if `reserved_gib` is the driver's figure, with CUDA's context and NCCL's buffers."""
    tokens_per_second: float | None
    """Tokens a second of one GPU."""
    step_seconds: float | None
    outcome: str
    """ok or oom."""
    note: str
    quote: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that is not judged, because it has a model or a setting that the benchmark does not know."""

    row: str
    reason: str


class NotKnownError(Exception):
    """A model or a setting that the benchmark does not know, or a cell that cannot be read."""


def use_models(folder: Path) -> None:
    """Read models from a folder too: `<name>.json`, or folders with a config.json, at any depth, named as in
    the table.

    Raises:
        DataError: it is not a folder, has no such file, or one of them is not a JSON object.
    """
    found = {}
    for path in sorted(folder.rglob("*.json")):
        if path.name != "config.json" and path.parent != folder:
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: not a model's config.json: {error}") from None
        if not isinstance(config, dict):
            raise DataError(f"{path}: not a model's config.json: no JSON object")
        found[path.parent.name if path.name == "config.json" else path.stem] = config
    if not found:
        raise DataError(f"{folder}: has no <name>.json, and no folder with a config.json")
    _ADDED.update(found)
    model.cache_clear()


_ADDED: dict[str, dict[str, Any]] = {}


def read(path: Path = TABLE) -> tuple[list[MeasuredRun], list[LeftOut]]:
    """Return the rows of a table, and those that have a model or a setting that is not known, or a cell that
    cannot be read.

    Columns that it does not know are ignored, and columns that it lacks are empty in each row.

    Raises:
        DataError: the file cannot be read, or has no column of models or of methods.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not a table of measurements: it is not UTF-8 text") from None
    lines = csv.reader(io.StringIO(text, newline=""))
    columns = [name.strip() for name in next(lines, [])]
    if missing := sorted({"model", "method"} - set(columns)):
        raise DataError(f"{path}: not a table of measurements: it has no column {', '.join(missing)}")
    runs: list[MeasuredRun] = []
    left_out: list[LeftOut] = []
    try:
        for cells in lines:
            row = dict.fromkeys(_COLUMNS, "") | {
                name: cell.strip() for name, cell in zip(columns, cells, strict=False)
            }
            if not any(row.values()):
                continue
            row["id"] = row["id"] or f"line {lines.line_num}"
            try:
                if len(cells) > len(columns):
                    raise NotKnownError("more cells than the table has columns")
                runs.append(_run(row))
            except NotKnownError as error:
                left_out.append(LeftOut(row["id"], str(error)))
    except csv.Error as error:
        raise DataError(f"{path}:{lines.line_num}: not a table of measurements: {error}") from None
    return runs, left_out


def left_out_table(left_out: Sequence[LeftOut], of: int) -> Table:
    """Return a line for each reason why rows were left out, most frequent first."""
    reasons: dict[str, list[str]] = {}
    for one in left_out:
        reasons.setdefault(one.reason, []).append(one.row)
    table = Table(
        title=f"{len(left_out)} of {of} rows left out: not known, or not readable", title_justify="left"
    )
    table.add_column("reason", overflow="fold")
    table.add_column("rows", justify="right")
    table.add_column("which", overflow="fold")
    for reason, rows in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        more = f" and {len(rows) - NAMED_ROWS} more" if len(rows) > NAMED_ROWS else ""
        table.add_row(escape(reason), str(len(rows)), escape(", ".join(rows[:NAMED_ROWS]) + more))
    return table


@cache
def model(name: str) -> Geometry:
    """Return the sizes of a model by its name in the table, or by its id on the hub.

    Raises:
        NotKnownError: neither measured_models.json nor Flytune has it, or its sizes cannot be read from its
            config.json.
    """
    configs = json.loads(MODELS.read_text(encoding="utf-8"))
    configs |= (
        {address.rpartition("/")[2]: entry["config"] for address, entry in shipped().items()}
        | configs
        | _ADDED
    )
    config = configs.get(name.rpartition("/")[2])
    if config is None:
        raise NotKnownError(
            f"model {name or '(empty)'} (add its config to {MODELS.name}, or name a folder: --models)"
        )
    try:
        return published_models.geometry(config, name)
    except SizesError as error:
        raise NotKnownError(f"model {name}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotKnownError(
            f"model {name}: its config.json cannot be read ({type(error).__name__}: {error})"
        ) from None


def _known(table: Mapping[str, Any], row: Mapping[str, Any], column: str) -> Any:
    value = row.get(column) or ""
    if value not in table:
        raise NotKnownError(f"{column} {value or '(empty)'}")
    return table[value]


def _run(row: dict[str, str]) -> MeasuredRun:
    _known(_METHODS, row, "method")
    sizes = model(row["model"])
    said = (_number(row, "params_b") or 0.0) * 1e9
    if said and abs(sizes.parameters - said) > PARAMETERS_MAY_DIFFER * said:
        raise NotKnownError(
            f"model {row['model']} of {said / 1e9:.4f} billion parameters (its config has "
            f"{sizes.parameters / 1e9:.4f})"
        )
    measured = {
        name: _number(row, name)
        for name in ("peak_alloc_gib", "peak_reserved_gib", "tok_s_gpu", "step_time_s")
    }
    if not row["outcome"] and any(measured.values()):
        # A run with a peak or a speed did not fail.
        row["outcome"] = "ok"
    return MeasuredRun(
        row=row["id"],
        source=row["source"],
        quality=row["quality"],
        model=row["model"],
        workload=_workload(row, sizes) if row["seq_len"] and row["micro_batch"] else None,
        gpu=row["gpu"],
        gpu_memory_gib=_number(row, "gpu_gib"),
        allocated_gib=measured["peak_alloc_gib"],
        reserved_gib=measured["peak_reserved_gib"],
        reserved_on_device=any(word in row["metric_mem"] for word in ON_THE_DEVICE),
        tokens_per_second=measured["tok_s_gpu"],
        step_seconds=measured["step_time_s"],
        outcome=_known(_OUTCOMES, row, "outcome"),
        note="; ".join(row[column] for column in ("notes", "other", "mem_note") if row[column]),
        quote=row["quote"],
    )


def _workload(row: dict[str, str], sizes: Geometry) -> Workload:
    method, quantization = row["method"], _known(_QUANTIZATION, row, "quant")
    if (method == "qlora") != (quantization != "none"):
        raise NotKnownError(f"method {method} with quant {row['quant'] or '(empty)'}")
    layout = LAYOUTS[_known(_SHARDING, row, "sharding")]
    if row["source"] == "QwenLM/Qwen README" and method == "full":
        # Its script for all parameters, finetune_ds.sh, is ZeRO-3 on one GPU as well.
        layout = LAYOUTS["zero3"]
    gpus, nodes = _count(row, "n_gpu"), _count(row, "nodes", 1)
    if gpus % nodes:
        raise NotKnownError(f"n_gpu {gpus} on {nodes} nodes")
    mixed = row["mixed"] or "none"
    if mixed.startswith("fsdp2"):
        precision = "policy"
    elif mixed == "bf16" and layout.fsdp and (method == "full" or row["weight_dtype"] == "fp32"):
        # transformers' Trainer hands FSDP a mixed precision policy where bf16 is set.
        precision = "policy"
    else:
        precision = _known(_PRECISIONS, row, "mixed")
    words = " ".join(row[column] for column in ("notes", "other")).lower()
    if "litgpt" in row["framework"]:
        # Its head is a parameter of its own in every model (scripts/convert_hf_checkpoint.py).
        sizes = sizes.model_copy(update={"tie_word_embeddings": False})
    return published_models.as_run(
        Workload(
            geometry=sizes,
            method=method,  # type: ignore[arg-type]
            layout=layout,
            gpus=gpus,
            nodes=nodes,
            workspaces=workspace_bytes("GH100" if row["gpu"].startswith("H") else "GA100"),
            gpu_memory_gib=DEVICE_GIB.get(row["gpu"].split("(")[0]) or _number(row, "gpu_gib") or 80.0,
            weight_dtype=_known(_DTYPES, row, "weight_dtype"),
            precision=precision,  # type: ignore[arg-type]
            compute_dtype="float16" if row["weight_dtype"] == "fp16" and mixed == "none" else "bfloat16",
            optimizer=_optimizer(row["optimizer"] or "adamw"),
            sequence_length=_count(row, "seq_len"),
            micro_batch=_count(row, "micro_batch"),
            accumulation=_count(row, "grad_accum", 1),
            quantization=quantization,
            lora_r=_count(row, "lora_r", 0),
            lora_targets=tuple(
                _target(name.strip(), row) for name in row["lora_targets"].split(",") if name.strip()
            ),
            offload=_known(_OFFLOADS, row, "offload"),
            checkpointing=_known(_CHECKPOINTING, row, "act_ckpt"),
            attention=_known(_ATTENTION, row, "attn"),
            variable_length="variable length" in words or "longest" in row["mem_note"].lower(),
            compiled=row["compile"] == "yes",
            # TRL does not prepare a model that FSDP will shard (SFTTrainer, is_sharded_qlora).
            kbit_float32="prepare_model_for_kbit" in words and not layout.fsdp,
            framework=_framework(row, sizes, layout),
        )
    )


def _framework(row: dict[str, str], sizes: Geometry, layout: Layout) -> Framework:
    """Return the framework by the source or by its name, with the row's loss.

    transformers' loss changed with 4.46; a row that does not state its release is an older one. Qwen 1 brings
    its own code.
    """
    named = row["framework"].lower()
    framework = FRAMEWORKS.get(row["source"]) or next(
        (one for words, one in FRAMEWORK_WORDS if re.search(words, named)), None
    )
    if framework is None:
        raise NotKnownError(f"framework {row['framework'] or '(empty)'}")
    release = _RELEASE.search(named)
    if (
        framework == frameworks.TRANSFORMERS_4_45
        and release
        and tuple(map(int, release.groups())) >= NEW_LOSS
    ):
        framework = frameworks.TRANSFORMERS
    loss = _known(_LOSSES, row, "ce_kernel")
    if sizes.model_type == "qwen" and loss == "hf":
        return replace(framework, loss=frameworks.QWEN_ZERO if layout.deepspeed else frameworks.QWEN)
    framework = frameworks.with_loss(framework, loss)
    return replace(framework, reentrant=False) if "use_reentrant False" in row["notes"] else framework


def _target(name: str, row: dict[str, str]) -> str:
    # litgpt adapts the head as any linear layer; PEFT trains a copy of it (modules_to_save).
    if name == "head" and row["source"].startswith("litgpt"):
        return "lora_head"
    return _known(_TARGETS, {"lora_targets": name}, "lora_targets")


def _optimizer(words: str) -> Optimizer:
    """Return AdamW by the words of the table; without "fused" it is torch's default, foreach on a GPU."""
    low = words.lower()
    if "adamw" not in low or "4bit" in low:
        raise NotKnownError(f"optimizer {words}")
    return Optimizer(
        name=words,
        # Two moments: a byte each in 8 bits (Dettmers et al. 2022), or float32 where the name says so.
        state_bytes=2.0 if "8bit" in low else 8.0 if "32bit" in low else None,
        implementation="fused" if "fused" in low or "bit" in low else "foreach",
        in_backward="in backward" in low,
        paged="paged" in low,
    )


def _number(row: Mapping[str, str], column: str) -> float | None:
    """Return a positive number; None of an empty cell."""
    if not (value := row[column]):
        return None
    try:
        number = float(value)
    except ValueError:
        raise NotKnownError(f"{column} {value} is not a number") from None
    if not math.isfinite(number) or number <= 0:
        raise NotKnownError(f"{column} {value} is not a positive number")
    return number


def _count(row: Mapping[str, str], column: str, default: int | None = None) -> int:
    """Return a whole number of 1 or more, also where it is written as 4.0; of an empty cell `default`, if
    there is one."""
    if not row[column] and default is not None:
        return default
    number = _number(row, column)
    if number is None:
        raise NotKnownError(f"{column} (empty)")
    if number % 1:
        raise NotKnownError(f"{column} {row[column]} is not a whole number")
    return int(number)
