"""The workload of a recipe on a shape, and the estimated time of its step."""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from flytune.errors import RecipeError
from flytune.hardware import Shape, accelerator_named
from flytune.hardware.accelerators import chip_of
from flytune.models import adapter_targets, scoring
from flytune.models.host_memory import CPU_LOSS_TOKENS
from flytune.objectives import objective_of
from flytune.objectives.bound import BoundRecipe
from flytune.planning.base_sizes import read_geometry
from flytune.planning.calibration import load_factors
from flytune.recipe import OPTIMIZERS, Model, Recipe
from flytune.sentences import counted
from flytune.sharding import ShardingBase
from training_estimates import Decoding, Optimizer, StepTime, Workload, step_time
from training_estimates.accelerators import workspace_bytes
from training_estimates.framework import CHUNKED, Framework, Loss
from training_estimates.model_states import States
from training_estimates.sizes import Geometry, Linear

OWN_LOGITS = Loss(per_word=8, moved_per_word=40, tiles=True, cpu_tokens=CPU_LOSS_TOKENS)
"""Flytune's loss of the model's own logits (models/own_logits.py): the logits and what caps them, in 16 bits,
their gradient, and its parts before they are joined; a few rows at a time are in float32."""
FLYTUNE = Framework(
    loss=replace(CHUNKED, cpu_tokens=CPU_LOSS_TOKENS),
    float32_copies=True,
    prepares_kbit=True,
    fsdp_reduces_float32=True,
    expandable_segments=True,
    # deepspeed_configs/ have offload_param.
    offloads_parameters=True,
    # Logits in bfloat16, and the float32 copy that accelerate make of them, of samples that are scored at
    # once (models/scoring.py: uses_fused_head).
    evaluated_row=6.0,
    # Collator takes 0.8e-6 of one core of a Xeon at 2.5 GHz, for packed rows of 4,096.
    data_seconds=1e-6,
)
"""Flytune's own training loop, as the estimates see it."""
BLOCK = 256
"""Numbers of an 8-bit state that share a float32 scale (bitsandbytes, Optimizer8bit.init_state)."""
_TABLES = {"embed_tokens": "embedding", "lm_head": "head"}
_PARTS = (
    "forward",
    "recomputation",
    "backward",
    "adapters",
    "kernels",
    "dequantization",
    "launching",
    "communication",
    "offload",
    "optimizer",
    "data",
    "drawing",
)
"""Fields of a StepTime that add up to its seconds."""


def workload(
    recipe: Recipe, geometry: Geometry, shape: Shape, micro_batch: int, accumulation: int
) -> Workload:
    """Return one step of a recipe on a shape, of whose GPUs all train."""
    bound, method, model = BoundRecipe(recipe), recipe.method.name, recipe.model
    objective, sharding, head = bound.objective, bound.sharding, bound.head
    return Workload(
        geometry=head.geometry(geometry),
        head_outputs=head.outputs,
        frozen=head.frozen(geometry, recipe),
        method=method,
        layout=sharding.layout,
        gpus=shape.world_size,
        nodes=shape.nodes,
        gpu_memory_gib=shape.gpu_memory_gib,
        weight_dtype=sharding.load_dtype,  # type: ignore[arg-type]  # a str in ShardingBase
        precision=sharding.precision,
        compute_dtype=model.dtype,
        optimizer=optimizer(sharding, shape),
        sequence_length=recipe.data.max_length,
        micro_batch=micro_batch,
        accumulation=accumulation,
        sequences_per_row=bound.row_kind.sequences,
        reference="none" if (reference := objective.reference()) == "precomputed" else reference,
        frozen_passes=objective.frozen_passes(),
        quantization=recipe.method.quantized if method == "qlora" else "none",
        lora_r=recipe.method.r if method != "full" else 0,
        lora_targets=() if method == "full" else targets(recipe, geometry),
        lora_leaves_out=() if method == "full" else _leaves_out(recipe, geometry),
        lora_ranks=() if method == "full" else _ranks(recipe, geometry),
        lora_experts=recipe.method.experts,
        dora=recipe.method.use_dora,
        adapter_dropout=objective.lora_dropout() > 0,
        token_rows=_token_rows(recipe),
        offload=recipe.sharding.offload,
        checkpointing="full" if recipe.training.activation_checkpointing else "none",
        attention=_attention(model.attn_implementation),
        variable_length=not recipe.data.packing,
        compiled=recipe.training.torch_compile,
        framework=replace(
            FLYTUNE,
            fused_kernels=recipe.training.use_liger_kernel,
            loss=OWN_LOGITS if own_logits(recipe, geometry) else FLYTUNE.loss,
            evaluated_row=0.0 if scoring.uses_fused_head(recipe) else FLYTUNE.evaluated_row,
        ),
        kbit_float32=method == "qlora" and sharding.kbit_float32,
        workspaces=workspace_bytes(chip_of(shape.accelerator)) if shape.is_gpu else 0.0,
        on_cpu=not shape.is_gpu,
        network_gbs=shape.fabric.gbs,
        decoding=_decoding(recipe, shape, micro_batch, accumulation),
        contrast=objective.contrast(geometry.hidden_size),
        image_tokens=micro_batch * recipe.data.max_length if recipe.data.images else 0,
        image_pixels=recipe.data.max_pixels,
        trains_tower=recipe.model.vision == "train",
    )


def _attention(implementation: str) -> Literal["flash", "sdpa", "eager"]:
    if implementation == "eager":
        return "eager"
    return "flash" if implementation.startswith("flash") else "sdpa"


def _decoding(recipe: Recipe, shape: Shape, micro_batch: int, accumulation: int) -> Decoding | None:
    """Return the answers that a process draws in each step; None where the objective draws none."""
    if (draws := objective_of(recipe).draws()) is None:
        return None
    answers = math.ceil(draws.share * micro_batch * accumulation)
    # A prompt has a token at least.
    tokens = max(1, min(draws.tokens, recipe.data.max_length - 1))
    at_a_time = min(draws.at_a_time or micro_batch, answers)
    teacher = _sizes(draws.teacher.name_or_path, draws.teacher.revision) if draws.teacher else None
    evaluated = 0 if teacher else recipe.evaluation.batch_size
    # Processes of a node divide their answers among its servers; on GPUs that train each has its own.
    served = math.ceil(answers * shape.processes / draws.own_gpus) if draws.own_gpus else None
    return Decoding(answers, at_a_time, evaluated, tokens, draws.by_vllm, teacher, served)


@functools.cache
def _sizes(name_or_path: str, revision: str | None) -> Geometry:
    """Return the sizes of a model, which is read once: it may be on the hub, and each candidate of a plan
    asks."""
    return read_geometry(Model(name_or_path=name_or_path, revision=revision))


def own_logits(recipe: Recipe, geometry: Geometry) -> str | None:
    """Return why the loss is computed of all of the model's logits; None where TRL's chunked loss is its
    own."""
    named = recipe.method.target_modules if recipe.method.name != "full" else ()
    is_adapted = (
        "lm_head" in named
        if not isinstance(named, str)
        else named != "all-linear" and re.fullmatch(named, "lm_head")
    )
    if is_adapted:
        return "an adapter on the head"
    bound = BoundRecipe(recipe)
    return bound.objective.reads_logits or bound.head.own_logits(geometry)


def optimizer(sharding: ShardingBase, shape: Shape) -> Optimizer:
    """Return the states and the update of the optimizer of a sharding's recipe."""
    name = sharding.optimizer
    kind = OPTIMIZERS[name]
    states = {"adamw": 2, "lion": 1, "adafactor": 0, "sgd": 0}[kind.algorithm]
    # torch's SGD copies gradients to add the decay; both it and adamw_torch are foreach on a GPU only.
    copies = name == "adamw_torch" or (kind.algorithm == "sgd" and sharding.recipe.training.weight_decay > 0)
    implementation = "foreach" if copies else "fused"
    if kind.algorithm == "adafactor" or not shape.is_gpu:
        implementation = "for_loop"
    width = 1 + 4 / BLOCK if kind.bits == 8 else 4.0
    return Optimizer(
        name,
        None if kind.library == "torch" and states else states * width,
        implementation=implementation,  # type: ignore[arg-type]  # one of three words
        # On a CPU bitsandbytes keeps the states of a paged optimizer where those of any other are.
        paged=kind.paged and shape.is_gpu,
        embedding_bytes=states * 4.0 if kind.bits == 8 else None,
        factored=kind.algorithm == "adafactor",
    )


def time_of(workload: Workload, shape: Shape, states: States) -> StepTime | None:
    """Return the estimated time of one optimizer step; None on a CPU, and for a GPU without a row in
    accelerators.yaml."""
    if not shape.is_gpu:
        return None
    try:
        estimated = step_time.step(workload, accelerator_named(shape.accelerator), states)
    except RecipeError:
        return None
    if not (measured := load_factors().get(shape.name)):
        return estimated
    slower = {name: getattr(estimated, name) / measured.speed for name in (*_PARTS, "hidden")}
    return replace(estimated, **slower, utilization=estimated.utilization * measured.speed)


def parts_of(time: StepTime) -> dict[str, float]:
    """Return the seconds of a step by part, without parts that take none."""
    return {name: getattr(time, name) for name in _PARTS if getattr(time, name) > 0}


def targets(recipe: Recipe, geometry: Geometry) -> tuple[str, ...]:
    """Return the names of the linear layers that method.target_modules names, and of the tables that are
    trained."""
    tables = tuple(_TABLES[name] for name in recipe.method.modules_to_save)
    names = [linear.name for linear in _able(geometry) if any(_adapted(recipe, geometry, linear))]
    is_adapted = adapter_targets.matcher(recipe.method, geometry.model_type, geometry.decoder)
    able = adapter_targets.Modules(geometry.model_type, [], geometry.embedding, geometry.head).tables(
        recipe.method
    )
    adapters = tuple("lora_embedding" for name in able if name == geometry.embedding and is_adapted(name))
    return (*dict.fromkeys(names), *adapters, *tables)


def _leaves_out(recipe: Recipe, geometry: Geometry) -> tuple[str, ...]:
    """Return the keys of those linear layers that have a target's name and no adapter in any layer."""
    return tuple(linear.key for linear in _able(geometry) if not any(_adapted(recipe, geometry, linear)))


def _able(geometry: Geometry) -> list[Linear]:
    """Return what an adapter can change: linear layers, and the parameters of experts."""
    return [linear for linear in geometry.linears if linear.adaptable or linear.is_experts]


def adapter_problems(recipe: Recipe, geometry: Geometry) -> list[str]:
    """Return why the adapters of a recipe cannot be made on a model, a sentence each."""
    named = recipe.method.target_modules
    stacked = {linear.name for linear in geometry.linears if not linear.quantizable and not linear.adaptable}
    # PEFT would adapt the experts in the place of all layers of these names.
    fused = adapter_targets.FUSED_EXPERTS.get(geometry.model_type, frozenset[str]())
    leaves = {name: name.rpartition(".")[2] for name in named} if isinstance(named, list) else {}
    if experts := [
        name
        for name, leaf in leaves.items()
        if leaf in fused or leaf.removesuffix("_proj") in stacked | {"experts"}
    ]:
        router = ", and gate is their router" if "gate" in map(leaves.get, experts) else ""
        write = "" if recipe.method.experts else "write method.experts: true for adapters on them, and "
        return [
            f"method.target_modules: {', '.join(experts)}: the experts of {geometry.model_type} are one "
            f"parameter, which is not a layer{router}; {write}name layers of the attention here, or "
            "all-linear, which leaves experts and routers alone"
        ]
    if geometry.model_type in adapter_targets.MAMBA and "out" in targets(recipe, geometry):
        return [
            f"method.target_modules: {named}: PEFT adapts no out_proj of a {geometry.model_type}, whose "
            "kernel does not call it as a module; name the other layers in a list"
        ]
    if not geometry.linears:
        return []
    if problems := adapter_targets.problems(recipe, _named(geometry)):
        return problems
    return [*_too_wide(recipe, geometry), *_table_problems(recipe, geometry)]


def _named(geometry: Geometry) -> adapter_targets.Modules:
    """Return the names of a model's modules, as far as they follow from its sizes."""
    linear = [name for linear in geometry.linears if linear.adaptable for name in _modules(geometry, linear)]
    containers = set[str]()
    for name in linear:
        while (name := name.rpartition(".")[0]) and name not in containers:
            containers.add(name)
    stacked = [
        name for linear in geometry.linears if not linear.adaptable for name in _modules(geometry, linear)
    ]
    return adapter_targets.Modules(
        geometry.model_type,
        linear,
        geometry.embedding,
        geometry.head,
        experts=[
            name for linear in geometry.linears if linear.is_experts for name in _modules(geometry, linear)
        ],
        others=sorted({*containers, *stacked}),
        decoder=geometry.decoder,
    )


def _too_wide(recipe: Recipe, geometry: Geometry) -> Iterator[str]:
    """Yield the first layer of which PiSSA has fewer singular values than the adapter's rank."""
    if not recipe.method.is_pissa:
        return
    rank_of = adapter_targets.rank_of(recipe.method)
    widths = [(linear, min(linear.rows, linear.columns)) for linear in geometry.linears if linear.adaptable]
    for layer, width in widths:
        for name, is_adapted in zip(
            _modules(geometry, layer), _adapted(recipe, geometry, layer), strict=True
        ):
            if is_adapted and (rank := rank_of(name)) > width:
                field = "r" if rank == recipe.method.r else "rank_pattern"
                yield (
                    f"method.{field}: {rank}, but {name} is {layer.columns:,} x {layer.rows:,} and has "
                    f"{counted(width, 'singular value')}, "
                    f"from which init_lora_weights: {recipe.method.init_lora_weights} makes the adapter; "
                    f"write {width:,}"
                )
                return


def _table_problems(recipe: Recipe, geometry: Geometry) -> Iterator[str]:
    """Yield what is wrong with tables that are trained completely or by rows."""
    method, rows = recipe.method, geometry.vocab_size
    if "lm_head" in method.modules_to_save and geometry.tie_word_embeddings:
        yield (
            f"method.modules_to_save: lm_head: head and embedding of {recipe.model.name_or_path} are one "
            "tensor; write embed_tokens"
        )
    if (last := max(method.trainable_token_indices, default=0)) >= rows:
        yield f"method.trainable_token_indices: {last}: the model has {counted(rows, 'token')}"


def _adapted(recipe: Recipe, geometry: Geometry, linear: Linear) -> Iterator[bool]:
    """Yield for each module of a linear layer whether it gets an adapter."""
    is_adapted = adapter_targets.matcher(recipe.method, geometry.model_type, geometry.decoder)
    return (is_adapted(module) for module in _modules(geometry, linear))


def _modules(geometry: Geometry, linear: Linear) -> Iterator[str]:
    """Yield the names of a linear layer's modules in the decoder layers; of several experts that of the
    first."""
    if "*" not in linear.path:
        yield linear.path
        return
    for layer in linear.layers or range(geometry.num_hidden_layers):
        yield linear.path.replace("*", str(layer), 1).replace("*", "0")


def _ranks(recipe: Recipe, geometry: Geometry) -> tuple[tuple[str, float], ...]:
    """Return the mean ranks over all modules of those linear layers whose rank is not method.r in each."""
    method, mean_ranks = recipe.method, dict[str, float]()
    if not method.rank_pattern and method.is_all_linear:
        return ()
    rank_of = adapter_targets.rank_of(method)
    for linear in geometry.linears:
        pairs = zip(_modules(geometry, linear), _adapted(recipe, geometry, linear), strict=True)
        ranks = [rank_of(module) if adapted else 0 for module, adapted in pairs]
        if any(ranks) and (mean := sum(ranks) / len(ranks)) != method.r:
            mean_ranks[linear.key] = mean
    if "lora_embedding" in targets(recipe, geometry) and (rank := rank_of(geometry.embedding)) != method.r:
        mean_ranks["lora_embedding"] = rank
    return tuple(mean_ranks.items())


def _token_rows(recipe: Recipe) -> int:
    if recipe.method.name == "full":
        return 0
    return len(recipe.model.extra_special_tokens) + len(set(recipe.method.trainable_token_indices))
