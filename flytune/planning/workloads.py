"""The workload of a recipe on a shape, and the estimated time of its step."""

import re
from dataclasses import replace

from flytune.errors import RecipeError
from flytune.estimates import Optimizer, StepTime, Workload, step_time
from flytune.hardware import Shape, accelerator_named
from flytune.models import Geometry
from flytune.planning.calibration import load_factors
from flytune.recipe import OPTIMIZERS, Recipe
from flytune.sharding import ShardingBase

BLOCK = 256
"""Numbers of an 8-bit state that share a float32 scale (bitsandbytes, Optimizer8bit.init_state)."""
_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
_TABLES = {"embed_tokens": "embedding", "lm_head": "head"}
_PARTS = (
    "forward", "recomputation", "backward", "adapters", "kernels", "dequantization", "launching", "communication", "offload",
    "optimizer", "data",
)  # fmt: skip
"""Fields of a StepTime that add up to its seconds."""


def workload(
    recipe: Recipe, geometry: Geometry, sharding: ShardingBase, shape: Shape, micro_batch: int, accumulation: int
) -> Workload:
    """Return one step of a recipe on a shape."""
    method, model = recipe.method.name, recipe.model
    return Workload(
        geometry=geometry,
        method=method,
        layout=sharding.layout(recipe),
        gpus=shape.world_size,
        nodes=shape.nodes,
        gpu_memory_gib=shape.gpu_memory_gib,
        weight_dtype=sharding.load_dtype(recipe),  # type: ignore[arg-type]  # a str in ShardingBase
        precision=sharding.precision(recipe),
        compute_dtype=model.dtype,
        optimizer=optimizer(recipe, sharding, shape),
        sequence_length=recipe.data.max_length,
        micro_batch=micro_batch,
        accumulation=accumulation,
        quantization=recipe.method.quantized if method == "qlora" else "none",
        lora_r=recipe.method.r if method != "full" else 0,
        lora_targets=() if method == "full" else _targets(recipe),
        lora_ranks=_ranks(recipe, geometry.num_hidden_layers),
        dora=recipe.method.use_dora,
        adapter_dropout=recipe.method.lora_dropout > 0,
        token_rows=_token_rows(recipe),
        offload=recipe.sharding.offload,
        checkpointing="full" if recipe.training.activation_checkpointing else "none",
        attention="flash" if model.attn_implementation.startswith("flash") else "sdpa",
        variable_length=not recipe.data.packing,
        compiled=recipe.training.torch_compile,
        kbit_float32=method == "qlora" and sharding.prepares_kbit,
        on_cpu=not shape.is_gpu,
        network_gbs=shape.fabric.gbs,
    )


def optimizer(recipe: Recipe, sharding: ShardingBase, shape: Shape) -> Optimizer:
    """Return the states and the update of a recipe's optimizer."""
    name = sharding.optimizer(recipe)
    kind = OPTIMIZERS[name]
    states = {"adamw": 2, "lion": 1, "adafactor": 0, "sgd": 0}[kind.algorithm]
    # torch's SGD copies gradients to add the decay; both it and adamw_torch are foreach on a GPU only.
    copies = name == "adamw_torch" or (kind.algorithm == "sgd" and recipe.training.weight_decay > 0)
    implementation = "for_loop" if kind.algorithm == "adafactor" or not shape.is_gpu else "foreach" if copies else "fused"
    each = 1 + 4 / BLOCK if kind.bits == 8 else 4.0
    return Optimizer(
        name,
        None if kind.library == "torch" and states else states * each,
        implementation=implementation,  # type: ignore[arg-type]  # one of three words
        # On a CPU bitsandbytes keeps the states of a paged optimizer where those of any other are.
        paged=kind.paged and shape.is_gpu,
        embedding_bytes=states * 4.0 if kind.bits == 8 else None,
        factored=kind.algorithm == "adafactor",
    )


def time_of(workload: Workload, shape: Shape) -> StepTime | None:
    """Return the estimated time of one optimizer step; None on a CPU, and for a GPU without a row in accelerators.yaml."""
    if not shape.is_gpu:
        return None
    try:
        found = step_time.step(workload, accelerator_named(shape.accelerator))
    except RecipeError:
        return None
    if not (measured := load_factors().get(shape.name)):
        return found
    slower = {name: getattr(found, name) / measured.speed for name in (*_PARTS, "hidden")}
    return replace(found, **slower, utilization=found.utilization * measured.speed)


def parts_of(time: StepTime) -> dict[str, float]:
    """Return the seconds of a step by part, without parts that take none."""
    return {name: getattr(time, name) for name in _PARTS if getattr(time, name) > 0}


def _targets(recipe: Recipe) -> tuple[str, ...]:
    named = recipe.method.target_modules
    tables = tuple(_TABLES[name] for name in recipe.method.modules_to_save)
    if isinstance(named, str):
        return _LINEARS + tables
    return tuple(name.removesuffix("_proj") for name in named if name.removesuffix("_proj") in _LINEARS) + tables


def _ranks(recipe: Recipe, layers: int) -> tuple[tuple[str, float], ...]:
    """Return the mean rank of each linear layer that method.rank_pattern names in Llama's layout, matched as PEFT does.

    PEFT (utils/other.py, get_pattern_key) takes the first pattern that the end of a module's name matches.
    """
    method, found = recipe.method, []
    patterns = [(re.compile(rf"(.*\.)?({key})$"), rank) for key, rank in method.rank_pattern.items()]
    if not patterns:
        return ()
    for name in _LINEARS:
        part = "mlp" if name in ("gate", "up", "down") else "self_attn"
        modules = [f"model.layers.{layer}.{part}.{name}_proj" for layer in range(layers)]
        ranks = [next((rank for pattern, rank in patterns if pattern.match(module)), method.r) for module in modules]
        found.append((name, sum(ranks) / layers))
    return tuple(found)


def _token_rows(recipe: Recipe) -> int:
    if recipe.method.name == "full":
        return 0
    return len(recipe.model.extra_special_tokens) + len(set(recipe.method.trainable_token_indices))
