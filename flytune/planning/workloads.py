"""The workload of a recipe on a shape, and the estimated time of its step."""

import re
from collections.abc import Iterator
from dataclasses import replace

from flytune.errors import RecipeError
from flytune.estimates import Optimizer, StepTime, Workload, step_time
from flytune.estimates.framework import FLYTUNE
from flytune.estimates.model_states import States
from flytune.hardware import Shape, accelerator_named
from flytune.models import Geometry, Linear, adapted_layers
from flytune.objectives import objective_of
from flytune.planning.calibration import load_factors
from flytune.recipe import OPTIMIZERS, Recipe
from flytune.sharding import ShardingBase

BLOCK = 256
"""Numbers of an 8-bit state that share a float32 scale (bitsandbytes, Optimizer8bit.init_state)."""
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
    method, model, objective = recipe.method.name, recipe.model, objective_of(recipe)
    return Workload(
        geometry=geometry.with_reward_head() if recipe.objective.is_reward_model else geometry,
        reward_head=recipe.objective.is_reward_model,
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
        sequences_per_row=objective.sequences_per_row,
        reference="none" if (reference := objective.reference(recipe)) == "precomputed" else reference,
        frozen_passes=objective.frozen_passes(recipe),
        quantization=recipe.method.quantized if method == "qlora" else "none",
        lora_r=recipe.method.r if method != "full" else 0,
        lora_targets=() if method == "full" else targets(recipe, geometry),
        lora_leaves_out=() if method == "full" else _leaves_out(recipe, geometry),
        lora_ranks=() if method == "full" else _ranks(recipe, geometry),
        dora=recipe.method.use_dora,
        adapter_dropout=recipe.method.lora_dropout > 0 and not objective.switches_dropout_off(recipe),
        token_rows=_token_rows(recipe),
        offload=recipe.sharding.offload,
        checkpointing="full" if recipe.training.activation_checkpointing else "none",
        attention="flash" if model.attn_implementation.startswith("flash") else "sdpa",
        variable_length=not recipe.data.packing,
        compiled=recipe.training.torch_compile,
        framework=replace(FLYTUNE, fused_kernels=recipe.training.use_liger_kernel),
        # DeepSpeed casts norms and embeddings back to 16 bits.
        kbit_float32=method == "qlora" and sharding.prepares_kbit and not sharding.layout(recipe).deepspeed,
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


def time_of(workload: Workload, shape: Shape, states: States) -> StepTime | None:
    """Return the estimated time of one optimizer step; None on a CPU, and for a GPU without a row in accelerators.yaml."""
    if not shape.is_gpu:
        return None
    try:
        found = step_time.step(workload, accelerator_named(shape.accelerator), states)
    except RecipeError:
        return None
    if not (measured := load_factors().get(shape.name)):
        return found
    slower = {name: getattr(found, name) / measured.speed for name in (*_PARTS, "hidden")}
    return replace(found, **slower, utilization=found.utilization * measured.speed)


def parts_of(time: StepTime) -> dict[str, float]:
    """Return the seconds of a step by part, without parts that take none."""
    return {name: getattr(time, name) for name in _PARTS if getattr(time, name) > 0}


def targets(recipe: Recipe, geometry: Geometry) -> tuple[str, ...]:
    """Return the names of the linear layers that method.target_modules names, and of the tables that are trained."""
    tables = tuple(_TABLES[name] for name in recipe.method.modules_to_save)
    names = [linear.name for linear in geometry.linears if linear.adaptable and any(_adapted(recipe, geometry, linear))]
    return (*dict.fromkeys(names), *tables)


def _leaves_out(recipe: Recipe, geometry: Geometry) -> tuple[str, ...]:
    """Return the paths of those linear layers that have a target's name and no adapter in any layer."""
    return tuple(one.path for one in geometry.linears if one.adaptable and not any(_adapted(recipe, geometry, one)))


def no_adapters(recipe: Recipe, geometry: Geometry) -> str | None:
    """Return why method.target_modules cannot be adapted; None if it can."""
    named = recipe.method.target_modules
    stacked = {linear.name for linear in geometry.linears if not linear.quantizable and not linear.adaptable}
    if isinstance(named, list) and (
        experts := [name for name in named if name.rpartition(".")[2].removesuffix("_proj") in stacked | {"experts"}]
    ):
        return (
            f"method.target_modules: {', '.join(experts)}: the experts of {geometry.model_type} are one parameter, which gets "
            "no adapter; name layers of the attention, or write all-linear, which leaves experts and routers alone"
        )
    if geometry.model_type in adapted_layers.MAMBA and "out" in targets(recipe, geometry):
        return (
            f"method.target_modules: {named}: PEFT adapts no out_proj of a {geometry.model_type}, whose kernel does not call "
            "it as a module; name the other layers in a list"
        )
    if geometry.linears and not set(targets(recipe, geometry)) - set(_TABLES.values()):
        names = dict.fromkeys(one.path.rpartition(".")[2] for one in geometry.linears if one.adaptable)
        return (
            f"method.target_modules: {named}: no linear layer of {geometry.model_type} has such a name; "
            f"it has {', '.join(names)}"
        )
    return None


def _adapted(recipe: Recipe, geometry: Geometry, linear: Linear) -> Iterator[bool]:
    """Yield for each decoder layer whether a linear layer gets an adapter there, matched as PEFT does.

    PEFT (tuners/tuners_utils.py, check_target_module_exists): a regular expression matches a module's whole name, a name in
    a list its end.
    """
    named = recipe.method.target_modules
    if isinstance(named, str):
        if named.lower() == "all-linear":
            for module in _modules(geometry, linear):
                yield not adapted_layers.is_left_out(geometry.model_type, geometry.decoder, module)
            return
        pattern = re.compile(named)
        yield from (pattern.fullmatch(module) is not None for module in _modules(geometry, linear))
        return
    ends = tuple(f".{name}" for name in named)
    yield from (module in named or module.endswith(ends) for module in _modules(geometry, linear))


def _modules(geometry: Geometry, linear: Linear) -> Iterator[str]:
    """Yield the names of a linear layer's modules in the decoder layers; of several experts that of the first."""
    for layer in range(geometry.num_hidden_layers):
        yield linear.path.replace("*", str(layer), 1).replace("*", "0")


def _ranks(recipe: Recipe, geometry: Geometry) -> tuple[tuple[str, float], ...]:
    """Return the mean ranks over all layers of those linear layers whose rank is not method.r in each.

    PEFT (utils/other.py, get_pattern_key) takes the first of method.rank_pattern that the end of a module's name matches.
    """
    method, found = recipe.method, dict[str, float]()
    patterns = [(re.compile(rf"(.*\.)?({key})$"), rank) for key, rank in method.rank_pattern.items()]
    if not patterns and isinstance(method.target_modules, str) and method.target_modules.lower() == "all-linear":
        return ()
    for linear in geometry.linears:
        pairs = zip(_modules(geometry, linear), _adapted(recipe, geometry, linear), strict=True)
        ranks = [
            next((rank for pattern, rank in patterns if pattern.match(module)), method.r) if adapted else 0
            for module, adapted in pairs
        ]
        if any(ranks) and (mean := sum(ranks) / len(ranks)) != method.r:
            found[linear.name] = mean
    return tuple(found.items())


def _token_rows(recipe: Recipe) -> int:
    if recipe.method.name == "full":
        return 0
    return len(recipe.model.extra_special_tokens) + len(set(recipe.method.trainable_token_indices))
