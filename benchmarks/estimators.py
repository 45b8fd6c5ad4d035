"""Other estimators of training memory, each for the workloads that it is made for; None for others."""

import json
import os
import subprocess
from collections.abc import Sequence

from training_estimates import Workload
from training_estimates.workload import BYTES

GIB = 2**30
MIB = 2**20
# EleutherAI, cookbook, calc/calc_transformer_mem.py: its defaults.
ELEUTHER_BUCKET, ELEUTHER_LIVE = 5e8, 1e9
ELEUTHER_OPTIMIZER, ELEUTHER_GRADIENT = 12, 4

_FITCHECK = """
import json, sys
import fitcheck
for line in sys.stdin:
    model, training = json.loads(line)
    try:
        sizes, run = fitcheck.ModelConfig(**model), fitcheck.TrainingConfig(**training)
        report = fitcheck.estimate(sizes, run, fitcheck.get_gpu("a100-80"))
        print(json.dumps([report.total_mib - report.overhead_mib, report.total_mib]))
    except ValueError as error:
        print(json.dumps(None))
"""


def deepspeed(workload: Workload) -> float | None:
    """Return bytes by DeepSpeed's estimate_zero{2,3}_model_states_mem_needs: full fine-tunes whose states are
    divided."""
    if workload.method != "full" or not workload.layout.shards_gradients:
        return None
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    sizes, offload = workload.geometry, workload.offload == "cpu"
    machine = {
        "num_gpus_per_node": workload.gpus // workload.nodes,
        "num_nodes": workload.nodes,
        "cpu_offload": offload,
    }
    if not workload.layout.gathers_in_backward:
        return float(estimate_zero2_model_states_mem_needs(sizes.parameters, **machine)[1])
    largest = max(
        sizes.vocab_size * sizes.hidden_size, max(linear.rows * linear.columns for linear in sizes.linears)
    )
    return float(
        estimate_zero3_model_states_mem_needs(
            sizes.parameters, largest, cpu_offload_params=offload, **machine
        )[1]
    )


def accelerate(workload: Workload) -> float | None:
    """Return bytes by the formula behind `accelerate estimate-memory`: training with Adam on one GPU."""
    if workload.method != "full" or workload.gpus > 1:
        return None
    from accelerate.commands.estimate import estimate_training_usage

    parts = estimate_training_usage(workload.geometry.parameters * 4, workload.compute_dtype)
    return float(max(parts.values()))


def eleuther(workload: Workload) -> float | None:
    """Return bytes by calc_transformer_mem.py of EleutherAI's cookbook, rewritten from its text: full
    fine-tunes."""
    if workload.method != "full" or workload.degrees.gpus_per_process > 1:
        return None
    sizes, gpus = workload.geometry, workload.gpus
    hidden, layers = sizes.hidden_size, sizes.num_hidden_layers
    ratio = sizes.num_key_value_heads / sizes.num_attention_heads
    mlp = (3 if sizes.gated else 2) * layers * hidden * sizes.intermediate_size * sizes.experts
    norms = 8 * hidden * layers + 2 * hidden + hidden * workload.sequence_length
    parameters = 2 * sizes.vocab_size * hidden + norms + 2 * (1 + ratio) * layers * hidden**2 + mlp
    layout = workload.layout
    # Parameters that stay gathered from forward to backward (grad_op) count as whole, as under stage 2.
    stage = (
        3 if layout.gathers_in_backward else 2 if layout.shards_gradients else int(layout.shards_optimizer)
    )
    width = 2
    total = parameters * width / (gpus if stage == 3 else 1)
    total += parameters * ELEUTHER_GRADIENT / (gpus if stage >= 2 else 1)
    total += parameters * ELEUTHER_OPTIMIZER / (gpus if stage >= 1 else 1)
    if stage >= 1 and gpus > 1:
        total += ELEUTHER_BUCKET * width + (ELEUTHER_LIVE * width if stage == 3 else 0)
    each = 16 * width + 2
    if workload.checkpointing == "none":
        each += (2 * width + 1) * sizes.num_attention_heads * workload.sequence_length / hidden
    return float(total + workload.tokens * hidden * layers * each)


def fitcheck(workloads: Sequence[Workload], interpreter: str) -> list[tuple[float, float] | None]:
    """Return allocated and total bytes by fitcheck-llm, in an environment of its own; one GPU, dense
    models."""
    asked = [index for index, workload in enumerate(workloads) if _fitcheck_knows(workload)]
    lines = "\n".join(json.dumps(_fitcheck_question(workloads[index])) for index in asked)
    ran = subprocess.run(
        [interpreter, "-c", _FITCHECK], input=lines, capture_output=True, text=True, check=True
    )
    answers: list[tuple[float, float] | None] = [None] * len(workloads)
    for index, line in zip(asked, ran.stdout.splitlines(), strict=True):
        if said := json.loads(line):
            answers[index] = (said[0] * MIB, said[1] * MIB)
    return answers


def _fitcheck_knows(workload: Workload) -> bool:
    return workload.gpus == 1 and workload.geometry.experts == 1 and workload.quantization != "gptq4"


def _fitcheck_question(workload: Workload) -> tuple[dict[str, object], dict[str, object]]:
    sizes = workload.geometry
    model = {
        "name": sizes.model_type,
        "num_params": sizes.parameters,
        "hidden_size": sizes.hidden_size,
        "num_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_kv_heads": sizes.num_key_value_heads,
        "intermediate_size": sizes.intermediate_size,
        "vocab_size": sizes.vocab_size,
        "head_dim": sizes.head_dim,
        "tie_word_embeddings": sizes.tie_word_embeddings,
    }
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
    names |= {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    training = {
        "precision": "fp32" if BYTES[workload.weight_dtype] == 4 else "bf16",
        "quantization": "none" if workload.quantization == "none" else "nf4",
        "double_quant": workload.quantization == "nf4_double",
        "optimizer_dtype": "fp32"
        if workload.method != "full" or BYTES[workload.weight_dtype] == 4
        else "bf16",
        "batch_size": workload.micro_batch,
        "seq_len": workload.sequence_length,
        "lora_rank": workload.lora_r or None,
        "lora_targets": [names[name] for name in workload.lora_targets if name in names],
        "grad_checkpoint": workload.checkpointing != "none",
        "flash_attn": workload.attention == "flash",
        "grad_accum_steps": workload.accumulation,
    }
    return model, training
