"""Plans: shape, world size, micro batch, accumulation, memory and time of a recipe, or why no shape can run
it."""

from collections.abc import Callable, Sequence

from flytune.cluster import folders
from flytune.data import order
from flytune.errors import DoesNotFit, RecipeError
from flytune.hardware import Cluster, Shape, load_cluster, load_shapes
from flytune.hardware.shapes import GIB
from flytune.models import initial_adapter
from flytune.objectives import objective_of
from flytune.planning import (
    budget,
    candidates,
    choosing,
    drawing_answers,
    largest,
    ranking,
    requirements,
    save_interval,
    stage_shapes,
    workloads,
)
from flytune.planning.base_sizes import read_geometry
from flytune.planning.calibration import load_factors
from flytune.planning.candidates import Fit
from flytune.pods import disk
from flytune.recipe import Hardware, Recipe, learning_rates, run_length
from flytune.records import Calibration, Plan
from flytune.records.plan import TIGHT, Estimate
from flytune.sentences import counted, sharers
from training_estimates import activations, intervals, memory, towers
from training_estimates.intervals import Band
from training_estimates.sizes import Geometry
from training_estimates.workload import Workload

Trace = Callable[[Recipe, Shape, Geometry], Fit | str]


def make(
    recipe: Recipe,
    shapes: Sequence[Shape] | None = None,
    geometry: Geometry | None = None,
    samples: int | None = None,
    cluster: Cluster | None = None,
    trace: Trace | None = None,
) -> Plan:
    """Return the plan of a recipe on the shape of the cheapest run, of those that fit and that its hardware
    wishes allow.

    Where the closed form does not hold for the model, `trace` decides about GPUs (half a minute for each
    shape).

    Args:
        samples: number of training samples, if it is known; hours and price of the run follow from it.
        cluster: the cluster whose pods run it, so that the recipe's folders must be on their volumes; None
            for this machine.
        trace: the dry run's decision about one shape (flytune/dryrun/confirm.py: best_fit), which the planner
            does not import.

    Raises:
        RecipeError: method, sharding, dtype or wishes cannot work on any machine; the pods of no shape have
            the folders; the closed form does not hold for the model, and no dry run is given or possible
            here.
        DoesNotFit: nothing fits; a line for each allowed shape with what it lacks.
    """
    return decide(recipe, shapes, geometry, samples, cluster, trace)[1]


def decide(
    recipe: Recipe,
    shapes: Sequence[Shape] | None = None,
    geometry: Geometry | None = None,
    samples: int | None = None,
    cluster: Cluster | None = None,
    trace: Trace | None = None,
) -> tuple[Recipe, Plan]:
    """Return the recipe with the sharding that its plan has chosen, where it names none, and the plan that
    `make` returns."""
    shapes = load_shapes() if shapes is None else shapes
    geometry = read_geometry(recipe.model) if geometry is None else geometry
    chosen = fit(recipe, shapes, geometry, cluster, trace, samples)
    return chosen.recipe, advised(chosen, geometry, samples, shapes)


def fit(
    recipe: Recipe,
    shapes: Sequence[Shape],
    geometry: Geometry,
    cluster: Cluster | None = None,
    trace: Trace | None = None,
    samples: int | None = None,
) -> Fit:
    """Return the fit that `make` plans, with its arguments and its errors."""
    ways = choosing.layouts(recipe, geometry)
    if problems := [*candidates.impossible(ways[0], geometry), *initial_adapter.problems(recipe)]:
        raise RecipeError.of(f"recipe {recipe.name}", problems)
    wished, unsupported = candidates.wished(recipe, shapes), geometry.unsupported
    if unsupported and trace is None and any(shape.is_gpu for shape in wished):
        raise RecipeError(
            f"recipe {recipe.name}: model.name_or_path: {recipe.model.name_or_path}: the closed form does "
            f"not know {unsupported}; `flytune plan` asks the dry run"
        )
    unmounted = {
        shape.name: lacking
        for shape in wished
        if cluster is not None and (lacking := folders.problems(recipe, cluster, shape.name))
    }
    if len(unmounted) == len(wished):
        raise RecipeError.of(
            f"recipe {recipe.name}: folders of a cluster's pods", next(iter(unmounted.values()))
        )
    refusals = {name: "; ".join(lacking) for name, lacking in unmounted.items()}
    mounted = [shape for shape in wished if shape.name not in unmounted]
    steps, fits = steps_of(recipe, samples), list[Fit]()
    if unsupported:
        mounted = choosing.cheapest_first(ways[0], mounted, geometry, steps)
    for shape in mounted:
        if trace and unsupported and shape.is_gpu:
            best = trace(ways[0], shape, geometry)
        else:
            best = choosing.best_layout(ways, shape, geometry)
        if isinstance(best, str):
            refusals[shape.name] = best
        elif unsupported:
            # No further shape is traced: they are in order.
            return best
        else:
            fits.append(best)
    if fits:
        return min(fits, key=lambda fit: choosing.cost(fit, steps))
    lines = [f"{shape.name}: {refusals[shape.name]}" for shape in wished]
    if not unsupported:
        lines.append(_advice(recipe, shapes, wished, geometry))
    raise DoesNotFit(
        "\n".join([f"recipe {recipe.name}: no shape can hold it", *(f"  {line}" for line in lines)])
    )


def advised(
    chosen_fit: Fit, geometry: Geometry, samples: int | None, shapes: Sequence[Shape] | None = None
) -> Plan:
    """Return the plan of a fit, which says what would make it safe if it is tight."""
    plan = plan_of(chosen_fit, samples)
    if notes := choosing.replica_note(chosen_fit, geometry):
        plan = plan.model_copy(update={"reasons": [*plan.reasons, *notes]})
    if not chosen_fit.is_tight or geometry.unsupported:
        return plan
    shapes = load_shapes() if shapes is None else shapes
    # All changes on all shapes would take seconds.
    safe = _advice(chosen_fit.recipe, [chosen_fit.shape], [chosen_fit.shape], geometry, TIGHT)
    ways = [safe.removeprefix(ranking.WOULD_FIT)] if safe.startswith(ranking.WOULD_FIT) else []
    ways += _roomier(chosen_fit, geometry, shapes)
    warning = f"tight: {_over(plan)}" + (f", as with {'; or with '.join(ways)}" if ways else "")
    return plan.model_copy(update={"reasons": [*plan.reasons, warning]})


def _roomier(chosen_fit: Fit, geometry: Geometry, shapes: Sequence[Shape]) -> list[str]:
    """Return the cheapest other shape of a kind on which a recipe leaves a tenth free, as words; none if
    there is none."""
    for shape in (
        shape
        for shape in shapes
        if shape.is_gpu == chosen_fit.shape.is_gpu and shape.name != chosen_fit.shape.name
    ):
        other = candidates.best_fit(chosen_fit.recipe, shape, geometry)
        if isinstance(other, Fit) and not other.is_tight:
            price, free = shape.total_price_per_hour, 1 - other.share
            return [f"hardware.shape: {shape.name} (${price:.2f} an hour, {free:.0%} to spare)"]
    return []


def _advice(
    recipe: Recipe, shapes: Sequence[Shape], wished: Sequence[Shape], geometry: Geometry, share: float = 1.0
) -> str:
    """Return the change nearest in kind with which a recipe fits; if that costs more machines or the method,
    the length too."""
    nearest = ranking.change_that_fits(recipe, shapes, geometry, share)
    is_far = any(f"{field}: " in nearest for field in ("hardware.shape", "method", "data.max_length"))
    if is_far and (parts := _fewest_parts(recipe, wished, geometry, share)):
        return f"{ranking.WOULD_FIT}{parts}"
    length = ""
    if is_far and not recipe.sharding.is_auto:
        length = largest.shorter(recipe, geometry, wished, share)
    if length:
        # ranking's is a half, a quarter or an eighth.
        if nearest.startswith(f"{ranking.WOULD_FIT}data.max_length: "):
            return ranking.WOULD_FIT + length
        return f"{nearest}; with no other change, with {length}"
    return nearest


def _fewest_parts(recipe: Recipe, wished: Sequence[Shape], geometry: Geometry, share: float) -> str:
    """Return the smallest sharding.sequence_parallel with which a recipe fits, as words; empty if none
    does."""
    for shape in wished:
        for way in choosing.divided(recipe, shape, geometry):
            fit = candidates.best_fit(way, shape, geometry)
            if isinstance(fit, Fit) and fit.share <= share:
                parts, price = way.sharding.sequence_parallel, shape.total_price_per_hour
                return f"sharding.sequence_parallel: {parts} (on {shape.name}, ${price:.2f} an hour)"
    return ""


def rank(
    recipe: Recipe, by: ranking.By, shapes: Sequence[Shape] | None = None, geometry: Geometry | None = None
) -> ranking.Ranking:
    """Return all ways to run the recipe's method on all shapes that its wishes allow, except hardware.shape,
    best first.

    Raises:
        RecipeError: the method cannot work on this model, no shape satisfies the wishes, or the closed form,
            which ranks, does not hold for the model.
        DoesNotFit: nothing fits; what is missing on each shape for the recipe as it is.
    """
    shapes = load_shapes() if shapes is None else shapes
    geometry = read_geometry(recipe.model) if geometry is None else geometry
    if unsupported := geometry.unsupported:
        raise RecipeError(
            f"recipe {recipe.name}: model.name_or_path: {recipe.model.name_or_path}: all shapes are ranked "
            f"by the closed form, which does not know {unsupported}; name one shape, about which the dry run "
            "decides"
        )
    anywhere = on_shape(recipe, "auto")
    ranked = ranking.rank(anywhere, shapes, geometry, by)
    if not ranked.fits:
        make(anywhere, shapes, geometry)
    return ranked


def on_shape(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe with another hardware.shape; a named one replaces all other wishes except budget and
    headroom."""
    wish = recipe.hardware
    named = Hardware(shape=name, max_hours=wish.max_hours, max_price=wish.max_price, headroom=wish.headroom)
    wish = wish.model_copy(update={"shape": name}) if name == "auto" else named
    return recipe.model_copy(update={"hardware": wish})


def steps_of(recipe: Recipe, samples: int | None) -> int | None:
    """Return the optimizer steps of a run; None if neither the recipe nor the number of samples says it."""
    repeats = objective_of(recipe).repeats()
    return recipe.training.max_steps if samples is None else order.steps_of(recipe.training, samples, repeats)


def plan_of(fit: Fit, samples: int | None = None, chosen: str = "") -> Plan:
    """Return the plan of a fit; `chosen` says why it has its shape, if not as the recipe's `hardware` has
    it."""
    recipe, shape, work, time = fit.recipe, fit.shape, fit.workload, fit.time
    degrees, batch = work.degrees, recipe.training.global_batch_size
    assert degrees.batch(work.micro_batch, work.accumulation) == batch
    low, high = fit.likely
    steps = steps_of(recipe, samples)
    problem = recipe.training.schedule_problem(steps) if steps else None
    if problem:
        raise RecipeError(f"recipe {recipe.name}: training.{problem}")
    hours = []
    if time and steps:
        hour = time.seconds * steps / 3600
        hours = [hour * time.tokens_per_second / rate for rate in (high, time.tokens_per_second, low)]
    short = budget.shortfall(recipe.hardware, shape.total_price_per_hour, hours)
    measured = load_factors().get(shape.name)
    calibration = Calibration(**measured.model_dump(exclude={"name"})) if measured else None
    needs, lacking = stage_shapes.with_teacher(fit, samples)
    # The first node alone writes the weights that are gathered.
    saved = requirements.checkpoint_bytes(work) + shape.nodes * requirements.consolidated_bytes(fit, work)
    lost = save_interval.planned(recipe, shape, saved, time.seconds, samples) if time else None
    return Plan(
        recipe=recipe.name,
        key=recipe.key(),
        shape=shape.name,
        accelerator=shape.accelerator,
        nodes=shape.nodes,
        processes=degrees.processes,
        world_size=degrees.world,
        sequence_parallel=degrees.sequence_parallel,
        global_batch_size=batch,
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.accumulation,
        needs=needs,
        total_parameters=work.geometry.parameters,
        trained_parameters=work.trained,
        price_per_hour=shape.total_price_per_hour,
        step_seconds=workloads.parts_of(time) if time else {},
        tokens_per_second=[work.gpus * rate for rate in (low, time.tokens_per_second, high)] if time else [],
        steps=steps,
        hours=hours,
        interruptions=lost,
        loading=requirements.loading_forecast(fit, shape, work, load_cluster()),
        intervals=intervals_of(fit, steps),
        calibration=calibration,
        reasons=[
            f"shape {shape.name}: {chosen or choosing.reason(fit, steps)}",
            *_reasons(fit, samples, steps),
            *([save_interval.describe(lost)] if lost else []),
            *requirements.gather_reason(fit, work),
            *filter(None, [*lacking, disk.shortage(recipe, samples), short]),
            *([_calibrated(calibration)] if calibration else []),
        ],
    )


def _reasons(fit: Fit, samples: int | None, steps: int | None) -> list[str]:
    """Return the lines on the sharding, the batch, the steps, the objective and the model."""
    recipe, work = fit.recipe, fit.workload
    degrees, batch = work.degrees, recipe.training.global_batch_size
    most = recipe.training.per_device_train_batch_size or candidates.MAX_MICRO_BATCH
    is_modest = candidates.is_modest(recipe, fit.shape)
    within = f" with {candidates.CPU_ACTIVATIONS_GIB} GiB of activations" if is_modest else ""
    rows = samples * fit.objective.repeats() if samples else None
    lines = [
        fit.sharding_reason,
        f"micro batch {work.micro_batch}: of those up to {most} that divide "
        f"{counted(degrees.samples(batch), 'sample')} a process, the largest that fits{within}",
        f"{work.micro_batch} x {work.accumulation} accumulated x "
        f"{sharers(degrees.data_parallel, degrees.copies)} = {batch}, the global batch",
        learning_rates.doubt(recipe),
        *fit.sharding.reasons(),
        *fit.objective.reasons(),
        *(run_length.notes(recipe, steps, rows) if steps else run_length.unused(recipe)),
        *drawing_answers.reasons(fit),
        *stage_shapes.reference_reasons(fit, samples, steps),
        f"not counted: {work.geometry.left_out}" if work.geometry.left_out else None,
        fit.traced,
        *_rough(work.geometry, fit.traced is not None),
        *_images(work),
        *_stored_scores(work),
        *candidates.type_notes(recipe, work.geometry),
    ]
    return [line for line in lines if line]


def _over(plan: Plan) -> str:
    """Return what a tight plan needs more than the nine tenths that are safe."""
    need = plan.binding
    more = need.peak_bytes - TIGHT * need.available_bytes
    return f"{max(more, 0) / GIB:.1f} GiB of {need.resource} less would leave a tenth free"


def _rough(geometry: Geometry, is_traced: bool) -> list[str]:
    """Return what is rough in the plan of a model that the closed form does not know: time, and memory
    without a dry run."""
    if (unknown := geometry.unsupported) is None:
        return []
    if not is_traced:
        return [f"activations are rough: the closed form does not know {unknown}"]
    return [
        f"time and price are rough, from the {geometry.active_parameters / 1e9:.3g} billion parameters in "
        f"linear layers that a token passes: the closed form does not know {unknown}"
    ]


def _stored_scores(work: Workload) -> list[str]:
    """Return what an attention that stores its scores takes; nothing of another."""
    size = activations.scores_bytes(work)
    if not size:
        return []
    return [
        f"model.attn_implementation: eager stores the scores of each pair of tokens, {size / GIB:.2g} GiB a "
        "layer: its memory and time grow with the square of the length, and no published run shows its speed"
    ]


def _images(work: Workload) -> list[str]:
    """Return how the images of a micro batch are counted; nothing where it has none."""
    tower = work.geometry.tower
    if not work.image_tokens:
        return []
    if tower is None:
        return ["images: what reads them is not counted: its sizes do not follow from config.json"]
    kept = (
        f"{towers.kept_bytes(work) / GIB:.2f} GiB are kept for its backward pass"
        if work.trains_tower
        else "it is frozen, and keeps nothing for a backward pass"
    )
    return [
        f"images: as if all tokens were theirs: {towers.patches(work):,.0f} patches of a micro batch pass "
        f"{counted(tower.layers, 'layer')} of the tower, which take {towers.working_bytes(work) / GIB:.2f} "
        f"GiB at most while it computes; {kept}; a patch attends to up to {towers.attended(work):,.0f} others"
    ]


def _calibrated(factor: Calibration) -> str:
    runs = counted(factor.runs, "run")
    return (
        f"calibrated by {runs} on this shape (calibration.yaml): memory x {factor.memory:.2f}, speed x "
        f"{factor.speed:.2f}"
    )


def next_candidate(recipe: Recipe, plan: Plan) -> Recipe | None:
    """Return the recipe to plan instead of one that was out of memory when it ran: half the micro batch on
    the same shape, else the next row with more memory.

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


def intervals_of(fit: Fit, steps: int | None) -> dict[str, Estimate]:
    """Return the intervals of a fit by name (flytune/records/plan.py: Plan.intervals).

    None where nothing was published: on a CPU, and for models that the closed form does not know; of runs
    that draw their answers none of time.
    """
    work, time, shape = fit.workload, fit.time, fit.shape
    if not shape.is_gpu or work.geometry.unsupported:
        return {}
    measured = load_factors().get(shape.name)
    is_calibrated, factor = measured is not None, measured.memory if measured else 1.0
    table, capacity = memory.memory(work), work.gpu_memory_gib * memory.GIB
    room = capacity - sum(table.outside.values())
    intervals_by_name = {
        "allocated_bytes": _estimate(
            factor * table.allocated, intervals.allocated(work, is_calibrated), room
        ),
        "reserved_bytes": _estimate(
            min(factor * table.reserved(capacity), room), intervals.reserved(work, is_calibrated), room
        ),
    }
    # No published run that draws its answers was compared.
    if time is None or work.decoding:
        return intervals_by_name
    band = intervals.speed(work, is_calibrated)
    rate = _estimate(work.gpus * time.tokens_per_second, band)
    intervals_by_name["tokens_per_second"] = rate
    if not is_calibrated:
        intervals_by_name["after_a_run"] = _estimate(rate.value, intervals.after_a_run())
    step = _estimate(time.seconds, band).model_copy(
        update={"low": time.seconds / band.high, "high": time.seconds / band.low}
    )
    intervals_by_name["step_seconds"] = step
    if steps:
        intervals_by_name["hours"] = step.times(steps / 3600)
        intervals_by_name["price"] = step.times(steps / 3600 * shape.total_price_per_hour)
    return intervals_by_name


def _estimate(value: float, band: Band, most: float | None = None) -> Estimate:
    """Return an estimate with its interval, which ends at `most` at the latest."""
    high = value * band.high if most is None else max(value, min(value * band.high, most))
    return Estimate(
        low=value * band.low, value=value, high=high, held_out=band.held_out, coverage=round(band.coverage, 3)
    )
