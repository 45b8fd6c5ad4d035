"""Machines of the stages that do not train: the one that evaluates, which must hold a model that may have
been trained on several, and the one that computes the reference's log-probabilities."""

import logging
from dataclasses import replace
from typing import NamedTuple

from flytune.errors import DoesNotFit
from flytune.hardware import Shape, load_shapes, shape_named
from flytune.hardware.shapes import GIB
from flytune.objectives import objective_of
from flytune.planning import workloads
from flytune.planning.base_sizes import read_geometry
from flytune.planning.candidates import Fit
from flytune.recipe import Method, Recipe
from flytune.records import Need, Plan
from training_estimates import Workload, model_states
from training_estimates.model_states import quantized_bytes
from training_estimates.sizes import Geometry

log = logging.getLogger(__name__)

SHARE = 0.9
"""Share of memory for weights; the rest is for activations, logits, and the libraries' own."""


class Room(NamedTuple):
    """Bytes that one node has for weights."""

    gpus: float
    host: float


def evaluation_shape(recipe: Recipe, plan: Plan, geometry: Geometry | None = None) -> Shape:
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


def reference_shape(recipe: Recipe, plan: Plan, geometry: Geometry | None = None) -> Shape:
    """Return the cheapest row with the plan's accelerator of which one node holds the model, if possible on
    its GPUs.

    There is no optimizer.

    Raises:
        DoesNotFit: there is none.
    """
    planned, recipe = shape_named(plan.shape), _of_frozen(recipe)
    cheapest = _cheapest(recipe, planned, read_geometry(recipe.model) if geometry is None else geometry)
    if cheapest is None:
        raise DoesNotFit(
            f"recipe {recipe.name}: no node with {planned.accelerator} in shapes.yaml holds the reference "
            "model, whose log-probabilities are computed before training; add a larger row"
        )
    return cheapest


def _of_frozen(recipe: Recipe) -> Recipe:
    """Return the recipe whose base is the model that runs before training: the recipe's, or its teacher."""
    if (teacher := objective_of(recipe).teacher()) is None:
        return recipe
    return recipe.model_copy(update={"model": teacher, "method": Method(name="full")})


def _cheapest(recipe: Recipe, planned: Shape, geometry: Geometry) -> Shape | None:
    needed = weights(recipe, geometry)
    fits = [
        shape
        for shape in load_shapes()
        if shape.accelerator == planned.accelerator and needed <= usable(recipe, shape)
    ]

    def order(shape: Shape) -> tuple[bool, float, bool]:
        # Weights in host memory are moved to the GPU for each batch, which costs more than a larger machine.
        is_offloaded = shape.is_gpu and needed > room_of(shape).gpus
        return is_offloaded, shape.price_per_hour, shape.name != planned.name

    return min(fits, key=order, default=None)


def reference_reasons(fit: Fit, samples: int | None, steps: int | None) -> list[str]:
    """Compare a reference in each step with one that is computed before training, a line; none where there is
    no choice.

    The task runs one GPU at a time, whatever its shape has, over each pair once; a step runs the pass in all
    processes.
    """
    recipe, shape, work = fit.recipe, fit.shape, fit.workload
    if fit.objective.teacher():
        return _teacher_reasons(fit, samples, steps)
    task = _cheapest(recipe, shape, work.geometry) if "precomputed" in fit.objective.references else None
    seconds = _pass_seconds(work, shape)
    if task is None or seconds is None or not samples or not steps:
        return []
    before = _hours_before(seconds, fit, samples)
    prices = before * task.price_per_hour, seconds * steps / 3600 * shape.total_price_per_hour
    held = (
        f" and {model_states.reference_bytes(work) / GIB:.1f} GiB in each process"
        if recipe.method.name == "full"
        else ""
    )
    cheaper = "cheaper before training" if prices[0] < prices[1] else "cheaper in each step"
    if f"{prices[0]:.2f}" == f"{prices[1]:.2f}":
        cheaper = "no way is cheaper"
    return [
        f"reference: computed once on {task.name} it takes {before:.2g} h, ${prices[0]:.2f}; in each step "
        f"{seconds * steps / 3600:.2g} h, ${prices[1]:.2f}{held}: {cheaper} "
        "(objective.precompute_ref_log_probs)"
    ]


def _pass_seconds(work: Workload, shape: Shape) -> float | None:
    """Return the seconds that a frozen model's pass adds to a step; None where the time is not known."""
    without, beside = (
        workloads.time_of(replace(work, frozen_passes=number), shape, model_states.of(work))
        for number in (0, 1)
    )
    return None if without is None or beside is None else beside.seconds - without.seconds


def _hours_before(seconds: float, fit: Fit, samples: int) -> float:
    """Return the hours of a pass over all samples before training, of the seconds that it takes in a step."""
    return seconds * samples / fit.workload.degrees.samples(fit.recipe.training.global_batch_size) / 3600


def with_teacher(fit: Fit, samples: int | None) -> tuple[list[Need], list[str]]:
    """Return what a fit needs, with the teacher's tokens on the disk of a node that trains, and a warning
    where these may have no room.

    They are an upper limit, of samples that are all data.max_length long and trained completely: nothing is
    refused for it.
    """
    size = 2 * _stored_bytes(fit, samples)  # as it was stored, and as rows are read
    disk = next(need for need in fit.needs if need.resource == "disk")
    phases = {phase: parts | {"teacher's tokens": size} for phase, parts in disk.phases.items()}
    larger = disk.model_copy(update={"phases": phases})
    if not size:
        return fit.needs, []
    if larger.share <= 1:
        return [larger if need is disk else need for need in fit.needs], []
    return fit.needs, [
        f"warning: the teacher's tokens take up to {size / GIB:,.0f} GiB on the disk of a node that trains, "
        f"and {fit.shape.name} has {disk.margin_bytes / GIB:,.0f} GiB beside the rest: if the samples are "
        "that long and all of them is trained, lower objective.loss_top_k, or name a shape with more"
    ]


def _stored_bytes(fit: Fit, samples: int | None) -> int:
    """Return the most bytes of a teacher's tokens for the rows of the data; 0 where there are none, or their
    number is unknown."""
    draws = fit.objective.draws()
    if fit.objective.teacher() is None or (draws is not None and draws.share == 1):
        return 0
    return (samples or 0) * fit.recipe.data.max_length * fit.recipe.objective.bytes_of_a_token


def _teacher_reasons(fit: Fit, samples: int | None, steps: int | None) -> list[str]:
    """Compare a teacher that runs once, before training, with one beside the student in each step; and say
    which samples it was not made for."""
    frozen, shape = _of_frozen(fit.recipe), fit.shape
    geometry, length = read_geometry(frozen.model), frozen.data.max_length
    reasons = []
    if geometry.positions and length > geometry.positions:
        reasons.append(
            f"teacher: data.max_length {length:,} is more than the {geometry.positions:,} positions that "
            f"{frozen.model.name_or_path} was made for; its distributions beyond them are poor: lower "
            "max_length, or name another teacher"
        )
    task, held = _cheapest(frozen, shape, geometry), weights(frozen, geometry) / GIB
    if task is None or not samples or not steps:
        return reasons
    seconds = _pass_seconds(replace(fit.workload, geometry=geometry), shape)
    if seconds is None:
        return reasons
    before = _hours_before(seconds, fit, samples)
    stored = _stored_bytes(fit, samples) / GIB
    if fit.objective.draws() is not None:
        once = (
            f"its tokens for the rows of the data, computed once on {task.name}, take {before:.2g} h, "
            f"${before * task.price_per_hour:.2f}, and at most {stored:.2g} GiB of disk, twice that on a "
            "node that trains"
            if stored
            else f"held-out rows alone are computed once, on {task.name}"
        )
        return [
            *reasons,
            f"teacher: {held:.1f} GiB of weights in each process beside the student, and on the disk of a "
            f"node that trains; {once}",
        ]
    beside = seconds * steps / 3600
    return [
        *reasons,
        f"teacher: computed once on {task.name} it takes {before:.2g} h, "
        f"${before * task.price_per_hour:.2f}, and at most {stored:.2g} GiB of disk, twice "
        f"that on a node that trains; beside the student in each step it would take {beside:.2g} h, "
        f"${beside * shape.total_price_per_hour:.2f}, and {held:.1f} GiB of weights, in each process or "
        "shared between them",
    ]
