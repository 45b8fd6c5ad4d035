"""Choice of the machine that evaluates: one node, which must hold a model that may have been trained on
several."""

import logging
from typing import NamedTuple

from flytune.errors import DoesNotFit
from flytune.hardware import Shape, load_shapes, shape_named
from flytune.hardware.shapes import GIB
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import Recipe
from flytune.records import Plan
from training_estimates.model_states import quantized_bytes
from training_estimates.sizes import Geometry

log = logging.getLogger(__name__)

SHARE = 0.9
"""Share of memory for weights; the rest is for activations, logits, and the libraries' own."""


class Room(NamedTuple):
    """Bytes that one node has for weights."""

    gpus: float
    host: float


def shape_for(recipe: Recipe, plan: Plan, geometry: Geometry | None = None) -> Shape:
    """Return the row of which one node evaluates: evaluation.shape, else the plan's.

    Raises:
        DoesNotFit: it cannot hold the model, GPUs and host memory together; quantized weights must be on the
        GPUs.
        RecipeError: there is no such row.
    """
    shape = shape_named(recipe.evaluation.shape or plan.shape)
    needed = weights(recipe, read_geometry(recipe.model) if geometry is None else geometry)
    room = room_of(shape)
    if needed > usable(recipe, shape):
        others = [shape.name for shape in load_shapes() if needed <= usable(recipe, shape)]
        raise DoesNotFit(
            f"recipe {recipe.name}: evaluation: one node of {shape.name} has "
            f"{usable(recipe, shape) / GIB:.1f} GiB for weights, and the model takes {needed / GIB:.1f}; "
            + (
                f"write evaluation.shape: {others[0]}"
                if others
                else "no row of shapes.yaml is large enough: add one"
            )
        )
    if shape.is_gpu and needed > room.gpus:
        log.warning(
            "evaluation: %.1f GiB of weights on one node of %s, whose GPUs have %.1f for them: the rest is "
            "in host memory, which is slow; evaluation.shape may name a larger row",
            needed / GIB,
            shape.name,
            room.gpus / GIB,
        )
    return shape


def weights(recipe: Recipe, geometry: Geometry) -> float:
    """Return bytes of the evaluated model: in model.dtype; with qlora quantized linear layers, and the rest
    in float32."""
    if recipe.method.name != "qlora":
        return float(geometry.parameters * (4 if recipe.model.dtype == "float32" else 2))
    return (
        quantized_bytes(geometry, recipe.method.quantized)
        + (geometry.parameters - geometry.quantizable_parameters) * 4
    )


def usable(recipe: Recipe, shape: Shape) -> float:
    """Return the bytes that one node of a shape has for the weights of a recipe's model."""
    room = room_of(shape)
    return room.gpus if shape.is_gpu and recipe.method.name == "qlora" else sum(room)


def room_of(shape: Shape) -> Room:
    """Return the memory for weights of one node of a shape."""
    gpus = shape.processes * shape.gpu_memory_gib if shape.is_gpu else 0.0
    return Room(SHARE * gpus * GIB, SHARE * (shape.memory_gib - shape.shared_memory_gib) * GIB)
