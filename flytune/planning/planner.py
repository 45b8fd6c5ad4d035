"""Plans: shape, world size, micro batch, accumulation, memory and time of a recipe, or why no shape can run it."""

from collections.abc import Sequence

from flytune.data import order
from flytune.errors import DoesNotFit, RecipeError
from flytune.estimates import step_time
from flytune.hardware import Cluster, Shape, load_cluster, load_shapes
from flytune.models import Geometry, initial_adapter, read_geometry
from flytune.objectives import objective_of
from flytune.planning import (
    budget,
    candidates,
    folders,
    loading,
    pod_disk,
    ranking,
    reference_shape,
    requirements,
    save_interval,
    workloads,
)
from flytune.planning.calibration import load_factors
from flytune.planning.candidates import Fit
from flytune.planning.dryrun import confirm
from flytune.recipe import Hardware, Recipe
from flytune.records import Calibration, Plan
from flytune.sharding import sharding_of


def make(
    recipe: Recipe,
    shapes: Sequence[Shape] | None = None,
    geometry: Geometry | None = None,
    samples: int | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """Return the plan of a recipe on the cheapest shape an hour of those that fit and that its hardware wishes allow.

    Where the closed form does not hold for the model, the dry run decides about GPUs (half a minute for each shape).

    Args:
        samples: number of training samples, if it is known; hours and price of the run follow from it.
        cluster: the cluster whose pods run it, so that the recipe's folders must be on their volumes; None for this machine.

    Raises:
        RecipeError: method, sharding, dtype or wishes cannot work on any machine; the pods of no shape have the folders; the
            closed form does not hold for the model, and no dry run is possible here.
        DoesNotFit: nothing fits; a line for each allowed shape with what it lacks.
    """
    shapes = load_shapes() if shapes is None else shapes
    geometry = read_geometry(recipe.model) if geometry is None else geometry
    if problems := [*candidates.impossible(recipe, geometry), *initial_adapter.problems(recipe)]:
        raise RecipeError.of(f"recipe {recipe.name}", problems)
    refusals, unmounted = [], dict[str, list[str]]()
    wished = candidates.wished(recipe, shapes)
    unsupported = geometry.unsupported
    if unsupported and any(shape.is_gpu for shape in wished):
        confirm.require(recipe, unsupported)
    for shape in wished:
        if cluster is not None and (lacking := folders.problems(recipe, cluster, shape.name)):
            unmounted[shape.name] = lacking
            refusals.append(f"{shape.name}: {'; '.join(lacking)}")
            continue
        decide = confirm.best_fit if unsupported and shape.is_gpu else candidates.best_fit
        found = decide(recipe, shape, geometry)
        if isinstance(found, Fit):
            return plan_of(found, samples)
        refusals.append(f"{shape.name}: {found}")
    if len(unmounted) == len(wished):
        raise RecipeError.of(f"recipe {recipe.name}: folders of a cluster's pods", next(iter(unmounted.values())))
    lines = refusals if unsupported else [*refusals, ranking.change_that_fits(recipe, shapes, geometry)]
    raise DoesNotFit("\n".join([f"recipe {recipe.name}: no shape can hold it", *(f"  {line}" for line in lines)]))


def rank(
    recipe: Recipe, by: ranking.By, shapes: Sequence[Shape] | None = None, geometry: Geometry | None = None
) -> ranking.Ranking:
    """Return all ways to run the recipe's method on all shapes that its wishes allow, except hardware.shape, best first.

    Raises:
        RecipeError: the method cannot work on this model, no shape satisfies the wishes, or the closed form, which ranks,
            does not hold for the model.
        DoesNotFit: nothing fits; what is missing on each shape for the recipe as it is.
    """
    shapes = load_shapes() if shapes is None else shapes
    geometry = read_geometry(recipe.model) if geometry is None else geometry
    if unsupported := geometry.unsupported:
        raise RecipeError(
            f"recipe {recipe.name}: model.name_or_path: {recipe.model.name_or_path}: all shapes are ranked by the closed form, "
            f"which does not know {unsupported}; name one shape, about which the dry run decides"
        )
    anywhere = on_shape(recipe, "auto")
    found = ranking.rank(anywhere, shapes, geometry, by)
    if not found.fits:
        make(anywhere, shapes, geometry)
    return found


def on_shape(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe with another hardware.shape; a named one replaces all other wishes except the budget."""
    wish = recipe.hardware
    named = Hardware(shape=name, max_hours=wish.max_hours, max_price=wish.max_price)
    wish = wish.model_copy(update={"shape": name}) if name == "auto" else named
    return recipe.model_copy(update={"hardware": wish})


def plan_of(fit: Fit, samples: int | None = None) -> Plan:
    """Return the plan of a fit."""
    recipe, shape, work, time = fit.recipe, fit.shape, fit.workload, fit.time
    processes = sharding_of(recipe).processes(shape)
    world_size = processes * shape.nodes
    batch = recipe.training.global_batch_size
    assert work.micro_batch * work.accumulation * world_size == batch
    most = recipe.training.per_device_train_batch_size or candidates.MAX_MICRO_BATCH
    low, high = step_time.likely(work, time) if time else (0.0, 0.0)
    steps = recipe.training.max_steps if samples is None else order.steps_of(recipe.training, samples)
    if steps and (wrong := recipe.training.schedule_problem(steps)):
        raise RecipeError(f"recipe {recipe.name}: training.{wrong}")
    hour = time.seconds * steps / 3600 if time and steps else 0.0
    hours = [hour * time.tokens_per_second / rate for rate in (high, time.tokens_per_second, low)] if time and hour else []
    disk = pod_disk.shortage(recipe, samples)
    short = budget.shortfall(recipe.hardware, shape.total_price_per_hour, hours)
    measured = load_factors().get(shape.name)
    calibration = Calibration(**measured.model_dump(exclude={"name"})) if measured else None
    # The first node alone writes the weights that are gathered.
    saved = requirements.checkpoint_bytes(work) + shape.nodes * requirements.consolidated_bytes(recipe, work)
    lost = save_interval.planned(recipe, shape, saved, time.seconds, samples) if time else None
    return Plan(
        recipe=recipe.name,
        key=recipe.key(),
        shape=shape.name,
        accelerator=shape.accelerator,
        nodes=shape.nodes,
        processes=processes,
        world_size=world_size,
        global_batch_size=batch,
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.accumulation,
        needs=fit.needs,
        total_parameters=work.geometry.parameters,
        trained_parameters=work.trained,
        price_per_hour=shape.total_price_per_hour,
        step_seconds=workloads.parts_of(time) if time else {},
        tokens_per_second=[shape.world_size * rate for rate in (low, time.tokens_per_second, high)] if time else [],
        steps=steps,
        hours=hours,
        interruptions=lost,
        loading=loading.forecast(recipe, shape, work, load_cluster()),
        calibration=calibration,
        reasons=[
            f"shape {shape.name}: "
            + ("as the recipe says" if recipe.hardware.shape != "auto" else "of those that fit, it costs least an hour"),
            f"micro batch {work.micro_batch}: of those up to {most} that divide {batch // world_size} samples a process, the "
            "largest that fits"
            + (f" with {candidates.CPU_ACTIVATIONS_GIB} GiB of activations" if candidates.is_modest(recipe, shape) else ""),
            f"{work.micro_batch} x {work.accumulation} accumulated x {world_size} processes = {batch}, the global batch",
            *sharding_of(recipe).reasons(recipe),
            *objective_of(recipe).reasons(recipe),
            *reference_shape.reasons(fit, samples, steps),
            *([f"not counted: {work.geometry.left_out}"] if work.geometry.left_out else []),
            *([fit.traced] if fit.traced else []),
            *_rough(work.geometry, fit.traced is not None),
            *candidates.unknown_type(recipe, work.geometry),
            *([save_interval.describe(lost)] if lost else []),
            *requirements.gather_reason(recipe, work),
            *([disk] if disk else []),
            *([short] if short else []),
            *([_calibrated(calibration)] if calibration else []),
        ],
    )


def _rough(geometry: Geometry, is_traced: bool) -> list[str]:
    """Return what is rough in the plan of a model that the closed form does not know: time, and memory without a dry run."""
    if (unknown := geometry.unsupported) is None:
        return []
    if not is_traced:
        return [f"activations are rough: the closed form does not know {unknown}"]
    return [
        f"time and price are rough, from the {geometry.active_parameters / 1e9:.3g} billion parameters in linear layers that a "
        f"token passes: the closed form does not know {unknown}"
    ]


def _calibrated(factor: Calibration) -> str:
    runs = "1 run" if factor.runs == 1 else f"{factor.runs} runs"
    return f"calibrated by {runs} on this shape (calibration.yaml): memory x {factor.memory:.2f}, speed x {factor.speed:.2f}"
