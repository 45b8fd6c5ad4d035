"""A recipe on a shape: feasibility, micro batch, requirements and speed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flytune.errors import RecipeError
from flytune.hardware import Shape, this_machine
from flytune.hardware.shapes import GIB
from flytune.models import base_problems, model_types, rope
from flytune.objectives import objective_of
from flytune.objectives.bound import BoundRecipe
from flytune.planning import requirements, workloads
from flytune.planning.calibration import load_factors
from flytune.recipe import Recipe, learning_rates
from flytune.records import Need
from flytune.records.plan import STEP, TIGHT
from flytune.sentences import counted, sharers
from flytune.sharding import problems as sharding_problems
from flytune.sharding import sharding_of
from training_estimates import StepTime, Workload, model_states, step_time
from training_estimates.sizes import Geometry

# Samples in one forward pass at most: more take memory, and make no step of the GPUs in shapes.yaml faster.
MAX_MICRO_BATCH = 16
# GiB of the parts that a refusal lists.
LEAST_SHOWN_GIB = 0.05
# GiB of activations on a CPU at most, unless the recipe names a micro batch: a larger one only takes memory
# from other processes, and pads short samples to the longest of more (docs/measured/cpus.md).
CPU_ACTIVATIONS_GIB = 1.25


@dataclass(frozen=True, slots=True)
class Fit(BoundRecipe):
    """A recipe on a shape with one micro batch."""

    recipe: Recipe
    shape: Shape
    workload: Workload
    needs: list[Need]
    time: StepTime | None
    traced: str | None = None
    """Result of the dry run, as a sentence; None where the closed form decides."""
    sharding_reason: str | None = None
    """Reason for the sharding, as a sentence; None where the recipe names it."""

    @property
    def share(self) -> float:
        """Largest share of a resource that it needs."""
        return max(need.share for need in self.needs)

    @property
    def fits(self) -> bool:
        """True if it fits, and leaves hardware.headroom free."""
        return self.share <= 1 and self.needs[0].share <= allowed_share(self.recipe)

    @property
    def is_tight(self) -> bool:
        return self.share > TIGHT

    @property
    def likely(self) -> tuple[float, float]:
        """Tokens a second of one GPU between which nine of ten runs are; 0 where the time is not known."""
        is_calibrated = self.shape.name in load_factors()
        return step_time.likely(self.workload, self.time, is_calibrated) if self.time else (0.0, 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all GPUs; 0 where the time is not known."""
        return self.workload.gpus * self.time.tokens_per_second if self.time else 0.0

    @property
    def price_per_token(self) -> float:
        """US dollars."""
        rate = self.tokens_per_second
        return self.shape.total_price_per_hour / 3600 / rate if rate else math.inf


def allowed_share(recipe: Recipe) -> float:
    """Return the largest share of GPU memory (on a CPU, of process memory) that a plan may need: all but
    hardware.headroom."""
    return 1 - (recipe.hardware.headroom or 0.0)


def preferred_share(recipe: Recipe) -> float:
    """Return the same of a micro batch that is preferred to smaller ones."""
    return TIGHT if recipe.hardware.headroom is None else allowed_share(recipe)


def missing(recipe: Recipe, need: Need) -> str:
    """Return what a need lacks, as `1.2 GiB of GPU memory`; of one that fits, what it lacks for
    hardware.headroom."""
    if need.share > 1:
        return f"{_amount(-need.margin_bytes)} of {need.resource}"
    more = need.peak_bytes - allowed_share(recipe) * need.available_bytes
    return f"{_amount(more)} of {need.resource} for hardware.headroom {recipe.hardware.headroom:g}"


def _amount(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= LEAST_SHOWN_GIB * GIB else f"{math.ceil(size / 2**20)} MiB"


def scarcest(fit: Fit) -> Need:
    """Return the need that decides: the largest share, unless only hardware.headroom is not left."""
    need = max(fit.needs, key=lambda need: need.share)
    return need if need.share > 1 else fit.needs[0]


def best_fit(recipe: Recipe, shape: Shape, geometry: Geometry) -> Fit | str:
    """Return the largest micro batch that fits on a shape, preferably not tightly; or the reason why there is
    none."""
    fits = each(recipe, shape, geometry)
    if isinstance(fits, str):
        return fits
    held = [fit for fit in fits if fit.fits]
    well = [fit for fit in held if fit.needs[0].share <= preferred_share(recipe)]
    if is_modest(recipe, shape):
        most = CPU_ACTIVATIONS_GIB * GIB
        well = [fit for fit in well if fit.needs[0].phases[STEP].get("activations", 0) <= most] or well[-1:]
    return next(iter([*well, *held]), None) or lacks(fits[-1])


def is_modest(recipe: Recipe, shape: Shape) -> bool:
    """Return whether CPU_ACTIVATIONS_GIB bounds the micro batch as well."""
    return not shape.is_gpu and not recipe.training.per_device_train_batch_size


def each(recipe: Recipe, shape: Shape, geometry: Geometry) -> list[Fit] | str:
    """Return a recipe on a shape with each micro batch that its global batch allows, largest first; or why
    there is none."""
    bound = BoundRecipe(recipe)
    if reason := _no_own_gpus(bound, shape):
        return reason
    sharding, part = bound.sharding, training_part(recipe, shape)
    if reason := _misfit(bound, part):
        gpus = f"{part.processes} of {counted(shape.processes, 'GPU')} to train"
        return reason if part is shape else f"objective.engine.gpus leaves {gpus}: {reason}"
    share = sharding.degrees(part).samples(recipe.training.global_batch_size)
    most = recipe.training.per_device_train_batch_size or MAX_MICRO_BATCH
    sizes = sorted((size for size in range(1, min(most, share) + 1) if share % size == 0), reverse=True)
    reasons = {size: sharding.batch_problem(size, share // size) for size in sizes}
    if all(reasons.values()):
        return next(reason for reason in reasons.values() if reason)
    fits = []
    for micro_batch in (size for size in sizes if not reasons[size]):
        work = workloads.workload(recipe, geometry, part, micro_batch, share // micro_batch)
        states = model_states.of(work)
        needs, time = requirements.of(bound, shape, work, states), workloads.time_of(work, shape, states)
        fits.append(Fit(recipe, shape, work, needs, time))
    return fits


def training_part(recipe: Recipe, shape: Shape) -> Shape:
    """Return a row with those of its GPUs alone that train, at the row's price; the row itself where it has
    too few, which the plan refuses."""
    draws = objective_of(recipe).draws()
    if draws is None or not 0 < draws.own_gpus < shape.processes:
        return shape
    return shape.model_copy(update={"processes": shape.processes - draws.own_gpus})


def contradictions(recipe: Recipe) -> list[str]:
    """List the problems of a recipe that no shape and no base model solves, a sentence each."""
    return [*recipe.refusals(), *sharding_problems(recipe), *objective_of(recipe).problems()]


def impossible(recipe: Recipe, geometry: Geometry) -> list[str]:
    """List the problems of a recipe that no shape solves, a sentence each."""
    problems = [*contradictions(recipe), *learning_rates.problems(recipe)]
    problems += base_problems.of_base(recipe, geometry, sharding_of(recipe).reads_slices)
    problems += objective_of(recipe).base_problems(geometry)
    if recipe.method.name != "full":
        problems += workloads.adapter_problems(recipe, geometry)
    return problems


def type_notes(recipe: Recipe, geometry: Geometry) -> list[str]:
    """Return the plan's notes on the model's type: its loss, and that it was never tried."""
    notes = []
    if why := workloads.own_logits(recipe, geometry):
        notes.append(
            f"loss: of all logits of the model, which take memory: TRL's chunked loss leaves out {why}"
        )
    if recipe.method.experts:
        notes.append(
            "experts: each layer adds their adapters to their weights before it computes, so that it holds "
            "them twice; the time assumes that routers spread tokens evenly over experts"
        )
    notes += position_notes(recipe, geometry)
    if model_types.was_trained(geometry.tried_as or geometry.model_type):
        return notes
    return [
        *notes,
        f"model type {geometry.model_type}: not among those that were trained in small "
        "(flytune/models/model_types.json); --dry-run builds and traces it",
    ]


def position_notes(recipe: Recipe, geometry: Geometry) -> list[str]:
    """Return the plan's notes on samples longer than the base was made for, and on model.rope_scaling."""
    scaling, before = recipe.model.rope_scaling, geometry.rope_type
    length, made_for = recipe.data.max_length, geometry.positions or 1
    notes = []
    if scaling is not None:
        line = (
            f"positions: model.rope_scaling ({scaling.rope_type}, factor {scaling.factor:g}) makes "
            f"{made_for:,} of the base's"
        )
        if before not in (None, scaling.rope_type):
            line += (
                f"; it replaces the base's own scaling ({before}), with which it was trained: write {before}"
            )
        if scaling.rope_type in ("dynamic", "longrope"):
            line += (
                "; the frequencies of a micro batch follow from its longest sample, so that another micro "
                "batch has other losses (yarn has not)"
            )
        notes.append(line)
    if not base_problems.is_beyond(recipe, geometry):
        return notes
    times = f"{length / made_for:.3g}"
    if scaling is not None:
        remedy = f"write a factor of {scaling.factor * length / made_for:.3g}"
    elif before is not None:
        remedy = f"scale them further (model.rope_scaling, of the base's own type, {before})"
    elif geometry.model_type in rope.SCALED:
        remedy = (
            f"scale them (model.rope_scaling: {{rope_type: yarn, factor: {times}, "
            f"original_max_position_embeddings: {made_for}}})"
        )
    else:
        remedy = "write a scaling (rope_parameters) into the config.json of a copy of the base, and name that"
    return [
        *notes,
        f"positions: data.max_length {length:,} is {times} times the {made_for:,} that the base was made for "
        "(max_position_embeddings of its config.json, with its scaling); what is learned beyond them is "
        f"poor: lower max_length to {made_for:,}, or {remedy}",
    ]


def wished(recipe: Recipe, shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes that the recipe's wishes allow, in the given order."""
    wish, names = recipe.hardware, [shape.name for shape in shapes]
    if wish.shape != "auto" and wish.shape not in names:
        raise RecipeError(
            f"hardware.shape: {wish.shape}: no such row in shapes.yaml; there are {', '.join(names)}"
        )
    # Where there are GPUs, a cpu shape must be asked for: it is the cheapest, and hardly meant for a run that
    # is rented.
    takes_cpus = (
        wish.accelerator == "cpu" or wish.shape != "auto" or not any(shape.is_gpu for shape in shapes)
    )
    allowed = [
        shape
        for shape in shapes
        if wish.shape in ("auto", shape.name)
        and wish.accelerator in (None, shape.accelerator)
        and wish.spot in (None, shape.spot)
        and (wish.max_price_per_hour is None or shape.total_price_per_hour <= wish.max_price_per_hour)
        and (shape.is_gpu or takes_cpus)
    ]
    if not allowed:
        wishes = (
            ", ".join(f"{key} {value}" for key, value in wish.model_dump(exclude_defaults=True).items())
            or "a GPU"
        )
        if all(map(this_machine.is_row, shapes)):
            here = " and ".join(map(this_machine.described, shapes))
            raise RecipeError(
                f"hardware: this machine has {here}, and not {wishes}; change hardware, or run it on a "
                "cluster"
            )
        raise RecipeError(f"hardware: no row of shapes.yaml has {wishes}; there are {', '.join(names)}")
    return allowed


def _no_own_gpus(bound: BoundRecipe, shape: Shape) -> str | None:
    """Return why a shape has no GPUs that draw alone; None if it has, or none are wanted."""
    draws = bound.objective.draws()
    if draws is None or not draws.own_gpus:
        return None
    where = f"objective.engine.gpus: {draws.own_gpus}"
    if not shape.is_gpu:
        return f"{where}: the shape has none; leave it out, so that a node's server is on the CPUs that train"
    if draws.own_gpus >= shape.processes:
        gpus = counted(shape.processes, "GPU")
        return f"{where}: a node has {gpus}, of which none would train; lower it, or leave it out"
    return None


def _misfit(bound: BoundRecipe, shape: Shape) -> str | None:
    """Return why a recipe cannot run on a shape whatever its size; None if it can."""
    recipe, sharding = bound.recipe, bound.sharding
    if misfit := sharding.misfit(shape):
        return f"{sharding.name} {misfit}"
    if misfit := sharding.sequence_misfit(shape):
        return misfit
    if recipe.model.dtype == "bfloat16" and not shape.bf16:
        return f"{shape.accelerator} does not compute in bfloat16"
    if recipe.model.attn_implementation.startswith("flash") and not shape.is_gpu:
        return "FlashAttention needs a GPU"
    if recipe.training.use_liger_kernel and not shape.is_gpu:
        return "training.use_liger_kernel: Liger's kernels need a GPU"
    degrees, batch = sharding.degrees(shape), recipe.training.global_batch_size
    if recipe.training.use_liger_kernel and degrees.gpus_per_process > 1:
        # liger-kernel 0.8.5: ops/rope.py starts its kernel on the process's current GPU.
        return (
            f"training.use_liger_kernel: its kernels run on one GPU of a process, and {sharding.name} has "
            f"{degrees.gpus_per_process}"
        )
    if shape.nodes > 1 and recipe.checkpoints.save_steps and not recipe.checkpoints.is_mounted:
        return (
            f"checkpoints.folder {recipe.checkpoints.folder} is another folder on each of "
            f"{counted(shape.nodes, 'node')}; name one that "
            "is mounted into all pods (/mnt/...), an address (s3://...), or leave checkpoints.save_steps out"
        )
    if near := degrees.near(batch):
        return (
            f"global_batch_size {batch} is not a multiple of its "
            f"{sharers(degrees.data_parallel, degrees.copies)}; {' or '.join(map(str, near))} would "
            "be"
        )
    return None


def lacks(fit: Fit) -> str:
    """Return the message of what the scarcest resource lacks, with the arithmetic where the recipe names the
    shape."""
    need = scarcest(fit)
    name, size = need.largest
    lacking = (
        f"{missing(fit.recipe, need)} missing: needs {need.peak_bytes / GIB:.1f} "
        f"({need.peak_phase}; most of it {name}, {size / GIB:.1f}), has {need.available_bytes / GIB:.1f}, "
        f"with micro batch {fit.workload.micro_batch}"
    )
    if need.resource == requirements.VLLM:
        lacking += "; raise objective.engine.gpu_memory_utilization"
    return lacking if fit.recipe.hardware.shape == "auto" else lacking + _arithmetic(fit, need)


def _arithmetic(fit: Fit, scarcest: Need) -> str:
    """Return the parts of the scarcest resource's peak, and what the others need and have, a line each."""
    parts = sorted(scarcest.phases[scarcest.peak_phase].items(), key=lambda part: -part[1])
    shown = [f"{name} {size / GIB:.1f}" for name, size in parts if size >= LEAST_SHOWN_GIB * GIB]
    lines = [f"{scarcest.peak_bytes / GIB:.1f} = {' + '.join(shown)}"]
    offloaded = dict(parts).get("offloaded")
    if offloaded and scarcest.resource == "host memory":
        # All processes of a node: their share of the bytes of all parameters.
        billions, nodes = fit.workload.trained / 1e9, fit.shape.nodes
        bytes_ = offloaded * nodes / fit.workload.trained
        share = f", on {counted(nodes, 'node')}" if nodes > 1 else ""
        lines.append(
            f"offloaded: {bytes_:.1f} bytes x {billions:.2f} billion trained parameters (weights, gradients, "
            f"states){share}"
        )
    others = [
        f"{need.resource} {need.peak_bytes / GIB:.1f} of {need.available_bytes / GIB:.1f}"
        + (" (missing too)" if need.share > 1 else "")
        for need in fit.needs
        if need is not scarcest
    ]
    lines.append(f"the rest: {', '.join(others)}")
    return "".join(f"\n    {line}" for line in lines)
