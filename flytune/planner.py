"""What follows from a recipe: shape, world size, micro batch, accumulation, memory; or why nothing can."""

from collections.abc import Sequence
from typing import Any

from flytune import collating, forecast, memory, speed
from flytune.errors import DoesNotFit, RecipeError
from flytune.models import Geometry, read_geometry
from flytune.recipe import Recipe
from flytune.records import Plan
from flytune.shapes import GIB, Shape, load_shapes
from flytune.strategies import pair_problem, strategy_of

# Samples in one forward pass at most: beyond it a step of the GPUs in shapes.yaml gains nothing but memory.
MAX_MICRO_BATCH = 16


def make(recipe: Recipe, shapes: Sequence[Shape] | None = None, geometry: Geometry | None = None) -> Plan:
    """The plan of a recipe on the cheapest shape that fits and that its hardware wishes allow.

    Raises:
        RecipeError: method, sharding, dtype or wishes that cannot work, whatever the machine.
        DoesNotFit: a line for each shape that was looked at, with what it lacks.
    """
    shapes = load_shapes() if shapes is None else shapes
    geometry = read_geometry(recipe.model) if geometry is None else geometry
    if problems := _impossible(recipe, geometry):
        raise RecipeError.of(f"recipe {recipe.name}", problems)
    refusals = []
    for shape in _wished(recipe, shapes):
        found = _on(recipe, shape, geometry)
        if isinstance(found, Plan):
            return found
        refusals.append(f"{shape.name}: {found}")
    lines = [f"recipe {recipe.name}: no shape can hold it", *(f"  {line}" for line in refusals)]
    raise DoesNotFit("\n".join([*lines, f"  {_change_that_fits(recipe, shapes, geometry)}"]))


def _change_that_fits(recipe: Recipe, shapes: Sequence[Shape], geometry: Geometry) -> str:
    """The first of a few changes, smallest first, under which the same recipe has a plan."""
    wish = {"shape": "auto", "max_price_per_hour": None}
    changes: list[tuple[str, dict[str, Any]]] = [
        ("training.activation_checkpointing: true", {"training": {"activation_checkpointing": True}}),
        ("sharding: zero3", {"sharding": {"name": "zero3"}}),
        ("hardware.shape: auto", {"hardware": wish}),
        ("hardware.shape: auto, sharding: zero3", {"hardware": wish, "sharding": {"name": "zero3"}}),
        ("method: lora, sharding: zero3", {"hardware": wish, "method": {"name": "lora"}, "sharding": {"name": "zero3"}}),
        (
            "method: qlora, sharding: device_map",
            {"hardware": wish, "method": {"name": "qlora"}, "sharding": {"name": "device_map"}},
        ),
    ]
    for words, change in changes:
        content = recipe.model_dump()
        for section, fields in change.items():
            content[section] = fields if "name" in fields else content[section] | fields
        changed = Recipe.model_validate(content)
        if _impossible(changed, geometry):
            continue
        for shape in _wished(changed, shapes):
            plan = _on(changed, shape, geometry)
            if isinstance(plan, Plan):
                return f"it would fit with {words} (on {shape.name}, ${plan.price_per_hour:.2f} an hour)"
    return "no change of method, sharding or shape makes it fit; lower data.max_length, or add a larger shape to shapes.yaml"


def _impossible(recipe: Recipe, geometry: Geometry) -> list[str]:
    problems = []
    if pair := pair_problem(recipe):
        problems.append(pair)
    if "8bit" in recipe.training.optim and (reason := strategy_of(recipe).no_8bit_optimizer):
        problems.append(f"training.optim: {recipe.training.optim} with sharding {recipe.sharding.name}: {reason}; use auto")
    if geometry.quantized and recipe.method.name == "full":
        problems.append(
            f"method: full, but the weights of {recipe.model.name_or_path} are quantized ({geometry.quantized}): they have no "
            "gradients; train an adapter on them (method: qlora), or name the 16-bit model that they were made from"
        )
    if recipe.data.packing and (reason := collating.refusal(geometry.model_type, recipe.model.trust_remote_code)):
        problems.append(f"data.packing: {reason}")
    if recipe.model.dtype == "float16" and geometry.dtype == "bfloat16":
        problems.append(
            f"model.dtype: float16, but {recipe.model.name_or_path} was trained in bfloat16, whose range float16 does not "
            "have (its activations overflow); use bfloat16 or float32"
        )
    if recipe.model.dtype == "float32" and recipe.model.attn_implementation.startswith("flash"):
        problems.append("model.attn_implementation: FlashAttention computes in 16 bits; use sdpa, or another model.dtype")
    if recipe.model.revision is not None and recipe.model.name_or_path.startswith((".", "/", "~")):
        problems.append("model.revision: only models on the hub have one; a folder is what it is")
    return problems


def _wished(recipe: Recipe, shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes that the recipe's wishes allow, cheapest first as they come."""
    wish, names = recipe.hardware, [shape.name for shape in shapes]
    if wish.shape != "auto" and wish.shape not in names:
        raise RecipeError(f"hardware.shape: {wish.shape}: no such row in shapes.yaml; there are {', '.join(names)}")
    allowed = [
        shape
        for shape in shapes
        if wish.shape in ("auto", shape.name)
        and wish.accelerator in (None, shape.accelerator)
        and wish.spot in (None, shape.spot)
        and (wish.max_price_per_hour is None or shape.total_price_per_hour <= wish.max_price_per_hour)
        # A cpu shape is for those who ask for it: it is cheapest, and never what a rented run is meant for.
        and (shape.is_gpu or "cpu" in (wish.accelerator, shape.accelerator if wish.shape == shape.name else None))
    ]
    if not allowed:
        wishes = ", ".join(f"{key} {value}" for key, value in wish.model_dump(exclude_defaults=True).items()) or "a GPU"
        raise RecipeError(f"hardware: no row of shapes.yaml has {wishes}; there are {', '.join(names)}")
    return allowed


def _on(recipe: Recipe, shape: Shape, geometry: Geometry) -> Plan | str:
    """The plan on one shape, or why there is none."""
    strategy = strategy_of(recipe)
    if misfit := strategy.misfit(recipe, shape):
        return f"{strategy.name} {misfit}"
    if recipe.model.dtype == "bfloat16" and not shape.bf16:
        return f"{shape.accelerator} does not compute in bfloat16"
    if recipe.model.attn_implementation.startswith("flash") and not shape.is_gpu:
        return "FlashAttention needs a GPU"
    if shape.nodes > 1 and recipe.checkpoints.save_steps and not recipe.checkpoints.is_mounted:
        return (
            f"checkpoints.folder {recipe.checkpoints.folder} is another folder on each of {shape.nodes} nodes; name one that "
            "is mounted into all pods (/mnt/...), an address (s3://...), or leave checkpoints.save_steps out"
        )
    world_size = strategy.processes(shape) * shape.nodes
    batch = recipe.training.global_batch_size
    if batch % world_size:
        below = batch // world_size * world_size
        near = f"{below} or {below + world_size}" if below else str(world_size)
        return f"global_batch_size {batch} is no multiple of its {world_size} processes; {near} would be"
    if disk := _lacks_on_host(recipe, shape, geometry):
        return disk
    available = memory.available_bytes(shape)
    share = batch // world_size
    most = recipe.training.per_device_train_batch_size or MAX_MICRO_BATCH
    for micro_batch in sorted((size for size in range(1, most + 1) if share % size == 0), reverse=True):
        work = forecast.workload(recipe, geometry, strategy, shape, micro_batch, share // micro_batch)
        table = memory.components(recipe, strategy, shape, work)
        if sum(component.bytes for component in table) <= available:
            break
    else:
        needed, largest = sum(component.bytes for component in table), table[0]
        return (
            f"needs {needed / GIB:.1f} GiB a process with one sample at a time, has {available / GIB:.1f}; "
            f"most of it {largest.name} ({largest.bytes / GIB:.1f} GiB)"
        )
    accumulation = share // micro_batch
    assert micro_batch * accumulation * world_size == batch
    time = forecast.time_of(work, shape)
    low, high = speed.likely(work, time) if time else (0.0, 0.0)
    return Plan(
        recipe=recipe.name,
        key=recipe.key(),
        shape=shape.name,
        accelerator=shape.accelerator,
        nodes=shape.nodes,
        processes=strategy.processes(shape),
        world_size=world_size,
        global_batch_size=batch,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        memory=table,
        memory_available_bytes=available,
        total_parameters=geometry.parameters,
        trained_parameters=geometry.trained(recipe.method),
        price_per_hour=shape.total_price_per_hour,
        step_seconds=forecast.parts_of(time) if time else {},
        tokens_per_second=[shape.world_size * rate for rate in (low, time.tokens_per_second, high)] if time else [],
        reasons=[
            f"shape {shape.name}: " + ("as the recipe says" if recipe.hardware.shape != "auto" else "the cheapest that fits"),
            f"micro batch {micro_batch}: the largest up to {most} that divides {share} samples a process and fits",
            f"{micro_batch} x {accumulation} accumulated x {world_size} processes = {batch}, the recipe's global batch",
        ],
    )


def _lacks_on_host(recipe: Recipe, shape: Shape, geometry: Geometry) -> str | None:
    # The weights are downloaded once and written once: as stored (16 bit), and the export.
    weights = geometry.parameters * 2.0 * (2 if recipe.method.name == "full" else 1)
    parts = {"the weights": weights, "what is offloaded": strategy_of(recipe).disk_states(geometry, recipe) / shape.nodes}
    if copies := recipe.checkpoints.copies_on_disk:
        # Float32 weights and both moments of what is trained.
        parts["checkpoints"] = 12.0 * geometry.trained(recipe.method) * copies
    if sum(parts.values()) > shape.disk_gib * GIB:
        table = ", ".join(f"{size / GIB:.0f} for {name}" for name, size in parts.items() if size)
        return f"needs {sum(parts.values()) / GIB:.0f} GiB of disk on a node ({table}), has {shape.disk_gib}"
    host, has = memory.host_bytes(recipe, geometry, strategy_of(recipe), shape), shape.memory_gib - shape.shared_memory_gib
    if shape.is_gpu and host > has * GIB:
        return f"needs {host / GIB:.0f} GiB of host memory a node, has {has} beside /dev/shm"
    return None
