"""The plan's next candidate after one that was out of memory when it ran."""

from flytune.hardware import load_shapes
from flytune.planning import candidates
from flytune.planning.planner import on_shape
from flytune.recipe import Recipe
from flytune.records import Plan
from flytune.sentences import counted


def after(recipe: Recipe, plan: Plan) -> Recipe | None:
    """Return the recipe to plan instead: half the micro batch on the same shape, else the next row with more
    memory.

    The global batch stays. None if the recipe's wishes allow neither.
    """
    if (smaller := plan.halved()) is not None:
        size = smaller.per_device_train_batch_size
        training = recipe.training.model_copy(update={"per_device_train_batch_size": size})
        return on_shape(recipe.model_copy(update={"training": training}), plan.shape)
    allowed = candidates.wished(recipe, load_shapes())
    now = next((shape for shape in allowed if shape.name == plan.shape), None)
    memory = now.world_size * now.gpu_memory_gib if now else 0.0
    larger = [
        larger_shape
        for larger_shape in allowed
        if larger_shape.world_size * larger_shape.gpu_memory_gib > memory
    ]
    return on_shape(recipe, larger[0].name) if now and larger else None


def adopted(first: Plan, other: Plan, lack: str) -> Plan:
    """Return the plan of the next candidate, which continues the checkpoints of the first, with the reason:
    what it lacked."""
    size = other.per_device_train_batch_size
    reason = (
        f"{lack} on {first.shape} with {counted(first.per_device_train_batch_size, 'sample')} a pass; "
        f"once more on {other.shape} with {size}"
    )
    return other.model_copy(
        update={"recipe": first.recipe, "key": first.key, "reasons": [*other.reasons, reason]}
    )
