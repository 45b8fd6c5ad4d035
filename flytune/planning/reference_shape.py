"""The machine that computes the reference's log-probabilities before training, and what each kind of
reference costs."""

from dataclasses import replace

from flytune.errors import DoesNotFit
from flytune.hardware import Shape, load_shapes, shape_named
from flytune.hardware.shapes import GIB
from flytune.objectives import objective_of
from flytune.planning import evaluation_shape, workloads
from flytune.planning.base_sizes import read_geometry
from flytune.planning.candidates import Fit
from flytune.recipe import Recipe
from flytune.records import Plan
from training_estimates import model_states
from training_estimates.sizes import Geometry


def shape_for(recipe: Recipe, plan: Plan, geometry: Geometry | None = None) -> Shape:
    """Return the cheapest row with the plan's accelerator of which one node holds the model, if possible on
    its GPUs.

    There is no optimizer.

    Raises:
        DoesNotFit: there is none.
    """
    planned = shape_named(plan.shape)
    found = _cheapest(recipe, planned, read_geometry(recipe.model) if geometry is None else geometry)
    if found is None:
        raise DoesNotFit(
            f"recipe {recipe.name}: no node with {planned.accelerator} in shapes.yaml holds the reference "
            "model, whose log-probabilities are computed before training; add a larger row"
        )
    return found


def _cheapest(recipe: Recipe, planned: Shape, geometry: Geometry) -> Shape | None:
    needed = evaluation_shape.weights(recipe, geometry)
    fits = [
        shape
        for shape in load_shapes()
        if shape.accelerator == planned.accelerator and needed <= evaluation_shape.usable(recipe, shape)
    ]

    def order(shape: Shape) -> tuple[bool, float, bool]:
        # Weights in host memory are moved to the GPU for each batch, which costs more than a larger machine.
        is_offloaded = shape.is_gpu and needed > evaluation_shape.room_of(shape).gpus
        return is_offloaded, shape.price_per_hour, shape.name != planned.name

    return min(fits, key=order, default=None)


def reasons(fit: Fit, samples: int | None, steps: int | None) -> list[str]:
    """Compare a reference in each step with one that is computed before training, a line; none where there is
    no choice.

    The task runs one GPU at a time, whatever its shape has, over each pair once; a step runs the pass in all
    processes.
    """
    recipe, shape, work = fit.recipe, fit.shape, fit.workload
    task = (
        _cheapest(recipe, shape, work.geometry) if "precomputed" in objective_of(recipe).references else None
    )
    passes = [
        workloads.time_of(replace(work, frozen_passes=number), shape, model_states.of(work))
        for number in (0, 1)
    ]
    if task is None or passes[0] is None or passes[1] is None or not samples or not steps:
        return []
    seconds = passes[1].seconds - passes[0].seconds
    before = seconds * samples / work.degrees.samples(recipe.training.global_batch_size) / 3600
    prices = before * task.price_per_hour, seconds * steps / 3600 * shape.total_price_per_hour
    held = (
        f" and {model_states.reference_bytes(work) / GIB:.1f} GiB in each process"
        if recipe.method.name == "full"
        else ""
    )
    cheaper = "before training" if prices[0] < prices[1] else "in each step"
    return [
        f"reference: computed once on {task.name} it takes {before:.2g} h, ${prices[0]:.2f}; in each step "
        f"{seconds * steps / 3600:.2g} h, ${prices[1]:.2f}{held}: cheaper {cheaper} "
        "(objective.precompute_ref_log_probs)"
    ]
