"""A table of published measurements of training runs, read into workloads with what was measured of each.

measurements.csv has a row a run, with the source and the quoted figure; other tables need the same columns. Memory is in
GiB: figures that a source prints in 1e9 bytes, or summed over its GPUs, were converted when the table was made. Sizes of
its models are those of their config.json, in measured_models.json or among those that Flytune ships; they must give the
table's parameter count. A row of a model or a setting that is not known is left out by name, and the others are read.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import frameworks
from benchmarks.frameworks import LAYOUTS
from flytune.errors import DataError
from flytune.estimates import Framework, Optimizer, Workload
from flytune.models import Geometry
from flytune.models.geometry import geometry, shipped
from flytune.sharding import Layout

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
"""Framework of each source; a source that is not listed is taken for transformers' Trainer up to 4.45."""
ON_THE_DEVICE = ("nvidia-smi",)
"""Words of metric_mem for reserved figures of the driver, which include CUDA's context."""
DEVICE_GIB = {"A100-80": 79.2, "A100-40": 39.4, "H100-80": 79.2, "A10G-24": 22.1, "RTX3090": 23.7, "RTX4090": 23.6}
"""GPU -> GiB that the driver offers (torch's total_memory), where the table has the nominal size."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SHARDING = {name: name for name in LAYOUTS}
_SHARDING |= {"fsdp1-grad_op": "fsdp1_grad_op", "fsdp2-grad_op": "fsdp2_grad_op", "": "none"}
_PRECISIONS = {"": "pure", "none": "pure", "bf16": "autocast", "amp_bf16/DEFAULT": "policy", "bf16/PURE": "policy"}
_QUANTIZATION = {"": "none", "nf4": "nf4", "nf4-dq": "nf4_double", "gptq4": "gptq4"}
_CHECKPOINTING = {"": "none", "none": "none", "full": "full", "full+offload": "offloaded"}
_LOSSES = {"hf": "hf", "foak_fast": "foak", "liger_fused": "liger", "litgpt_chunked": "chunked", "fp32_logits": "fp32_logits"}
_LOSSES |= {"chunked": "chunked", "": "hf"}
_ATTENTION = {"fa2": "flash", "fa2(triton)": "flash", "fa3": "flash", "eager": "eager"}
_ATTENTION |= dict.fromkeys(("sdpa", "sdpa/fa2", "sdpa_or_eager", ""), "sdpa")
_METHODS = {name: name for name in ("full", "lora", "qlora", "load")}
_OFFLOADS = {"": "none", "none": "none", "cpu": "cpu", "nvme": "nvme"}
_TARGETS = {name: name for name in ("q", "k", "v", "o", "gate", "up", "down")} | {"emb": "embedding", "head": "head"}
_OUTCOMES = {"ok": "ok", "oom": "oom"}


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One row: what was run, and what was measured of it. Memory is that of the fullest GPU."""

    row: str
    source: str
    quality: str
    """A: fully specified; B: mostly; C: with gaps."""
    model: str
    workload: Workload | None
    """None for a row without batch sizes, which measured loading."""
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
    """A model or a setting that the benchmark does not know."""


def read(path: Path = TABLE) -> tuple[list[MeasuredRun], list[LeftOut]]:
    """Return the rows of a table, and those that have a model or a setting that is not known.

    Raises:
        DataError: the file does not exist or lacks columns; a row has a value that cannot be read, with its line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    rows = csv.DictReader(text.splitlines())
    needed = {"id", "source", "model", "params_b", "method", "sharding", "n_gpu", "seq_len", "micro_batch", "outcome"}
    if missing := sorted(needed - set(rows.fieldnames or ())):
        raise DataError(f"{path}: not a table of measurements: it has no column {', '.join(missing)}")
    runs, left_out = [], []
    for row in rows:
        try:
            runs.append(_run(row))
        except NotKnownError as error:
            left_out.append(LeftOut(row["id"], str(error)))
        except (KeyError, ValueError, TypeError) as error:
            said = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{path}:{rows.line_num}: row {row['id']}: {said}") from None
    return runs, left_out


def describe(left_out: Sequence[LeftOut], of: int) -> str:
    """Return a line for each reason why rows were left out, most frequent first; empty if none was."""
    if not left_out:
        return ""
    reasons: dict[str, list[str]] = {}
    for one in left_out:
        reasons.setdefault(one.reason, []).append(one.row)
    lines = [f"{len(left_out)} of {of} rows left out, because the benchmark does not know their"]
    for reason, rows in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        more = f" and {len(rows) - NAMED_ROWS} more" if len(rows) > NAMED_ROWS else ""
        lines.append(f"  {reason}: {len(rows)} (row {', '.join(rows[:NAMED_ROWS])}{more})")
    return "\n".join(lines)


@cache
def model(name: str) -> Geometry:
    """Return the sizes of a model by its name in the table, or by its id on the hub.

    Raises:
        NotKnownError: neither measured_models.json nor Flytune has it.
    """
    configs = json.loads(MODELS.read_text(encoding="utf-8"))
    configs |= {address.rpartition("/")[2]: entry["config"] for address, entry in shipped().items()} | configs
    try:
        return geometry(configs[name.rpartition("/")[2]], name)
    except KeyError:
        raise NotKnownError(f"model {name} (add its config to {MODELS.name})") from None


def _known(table: Mapping[str, Any], row: Mapping[str, Any], column: str) -> Any:
    value = row.get(column) or ""
    if value not in table:
        raise NotKnownError(f"{column} {value or '(empty)'}")
    return table[value]


def _run(row: dict[str, Any]) -> MeasuredRun:
    sizes = model(row["model"])
    said = float(row["params_b"]) * 1e9
    if abs(sizes.parameters - said) > PARAMETERS_MAY_DIFFER * said:
        raise NotKnownError(
            f"model {row['model']} of {said / 1e9:.4f} billion parameters (its config has {sizes.parameters / 1e9:.4f})"
        )
    _known(_METHODS, row, "method")
    return MeasuredRun(
        row=row["id"],
        source=row["source"],
        quality=row.get("quality") or "",
        model=row["model"],
        workload=_workload(row, sizes) if row["seq_len"] and row["micro_batch"] else None,
        gpu=row.get("gpu") or "",
        gpu_memory_gib=_number(row, "gpu_gib"),
        allocated_gib=_number(row, "peak_alloc_gib"),
        reserved_gib=_number(row, "peak_reserved_gib"),
        reserved_on_device=any(word in (row.get("metric_mem") or "") for word in ON_THE_DEVICE),
        tokens_per_second=_number(row, "tok_s_gpu"),
        step_seconds=_number(row, "step_time_s"),
        outcome=_known(_OUTCOMES, row, "outcome"),
        note="; ".join(row[column] for column in ("notes", "other", "mem_note") if row.get(column)),
        quote=row.get("quote") or "",
    )


def _workload(row: dict[str, Any], sizes: Geometry) -> Workload:
    layout = LAYOUTS[_known(_SHARDING, row, "sharding")]
    if row["source"] == "QwenLM/Qwen README" and row["method"] == "full":
        # Its script for all parameters, finetune_ds.sh, is ZeRO-3 on one GPU as well.
        layout = LAYOUTS["zero3"]
    mixed = row["mixed"] or "none"
    if mixed.startswith("fsdp2"):
        precision = "policy"
    elif mixed == "bf16" and layout.fsdp and (row["method"] == "full" or row["weight_dtype"] == "fp32"):
        # transformers' Trainer hands FSDP a mixed precision policy where bf16 is set.
        precision = "policy"
    else:
        precision = _known(_PRECISIONS, row, "mixed")
    words = " ".join(row[column] or "" for column in ("notes", "other")).lower()
    return Workload(
        geometry=sizes,
        method=row["method"],
        layout=layout,
        gpus=int(row["n_gpu"]),
        nodes=int(row["nodes"] or 1),
        gpu_memory_gib=DEVICE_GIB.get((row["gpu"] or "").split("(")[0]) or _number(row, "gpu_gib") or 80.0,
        weight_dtype=_known(_DTYPES, row, "weight_dtype"),  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        compute_dtype="float16" if row["weight_dtype"] == "fp16" and mixed == "none" else "bfloat16",
        optimizer=_optimizer(row["optimizer"] or "adamw"),
        sequence_length=int(float(row["seq_len"])),
        micro_batch=int(float(row["micro_batch"])),
        accumulation=int(row["grad_accum"] or 1),
        quantization=_known(_QUANTIZATION, row, "quant"),  # type: ignore[arg-type]
        lora_r=int(float(row["lora_r"] or 0)),
        lora_targets=tuple(_target(name, row) for name in row["lora_targets"].split(",") if name),
        offload=_known(_OFFLOADS, row, "offload"),  # type: ignore[arg-type]
        checkpointing=_known(_CHECKPOINTING, row, "act_ckpt"),  # type: ignore[arg-type]
        attention=_known(_ATTENTION, row, "attn"),  # type: ignore[arg-type]
        variable_length="variable length" in words or "longest" in (row["mem_note"] or "").lower(),
        compiled=row["compile"] == "yes",
        # TRL does not prepare a model that FSDP will shard (SFTTrainer, is_sharded_qlora).
        kbit_float32="prepare_model_for_kbit" in words and not layout.fsdp,
        framework=_framework(row, sizes, layout),
    )


def _framework(row: dict[str, Any], sizes: Geometry, layout: Layout) -> Framework:
    """Return the framework by the source, with the row's loss.

    transformers' loss changed with 4.46; a row that does not state its release is an older one. Qwen 1 brings its own code.
    """
    framework = FRAMEWORKS.get(row["source"], frameworks.TRANSFORMERS_4_45)
    if framework == frameworks.TRANSFORMERS_4_45 and "tf4.48" in (row.get("framework") or ""):
        framework = frameworks.TRANSFORMERS
    loss = _known(_LOSSES, row, "ce_kernel")
    if sizes.model_type == "qwen" and loss == "hf":
        return replace(framework, loss=frameworks.QWEN_ZERO if layout.deepspeed else frameworks.QWEN)
    framework = frameworks.with_loss(framework, loss)
    return replace(framework, reentrant=False) if "use_reentrant False" in (row.get("notes") or "") else framework


def _target(name: str, row: dict[str, Any]) -> str:
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


def _number(row: dict[str, Any], column: str) -> float | None:
    value = row.get(column)
    try:
        return float(value) if value else None
    except ValueError:
        raise ValueError(f"{column} is {value!r}, not a number") from None
