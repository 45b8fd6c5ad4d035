"""Plans whose GPU memory the dry run confirms, or decides where the closed form does not hold."""

import importlib.util
import json
import tempfile
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from flytune import dryrun
from flytune.dryrun import DryRun
from flytune.dryrun.allocations import OPTIMIZER
from flytune.errors import DoesNotFit, RecipeError
from flytune.hardware import Shape, shape_named
from flytune.models import config_json
from flytune.models.config_json import config_file
from flytune.planning import candidates, planner
from flytune.planning.base_sizes import read_geometry
from flytune.planning.candidates import Fit
from flytune.recipe import Recipe
from flytune.records import Need, Plan
from flytune.records.plan import DRAW, FIRST_STEP, LOAD, STEP
from training_estimates import contrast, towers
from training_estimates.memory import GIB, TOWER, VECTORS
from training_estimates.sizes import Geometry

_NOT_TRACED = ("cuBLAS", "CUDA context", "NCCL", "fragmentation", "loading")
_LIBRARIES = ("torch", "transformers", "peft", "trl")


def _require(recipe: Recipe, unsupported: str) -> None:
    """Check that the dry run can decide about a model, of which the closed form does not know `unsupported`.

    Raises:
        RecipeError: it cannot, with the reason and the one way on.
    """
    problem = (
        f"recipe {recipe.name}: model.name_or_path: {recipe.model.name_or_path}: the closed form does "
        f"not know {unsupported}"
    )
    if missing := [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]:
        raise RecipeError(
            f"{problem}, and the dry run, which traces the model's own code, needs {', '.join(missing)}: "
            "plan where Flytune is installed with its training libraries (pip install 'flytune[train]'); for "
            "pods, write plan_in_training_image: true into cluster.yaml and register again"
        )
    if reason := dryrun.refusal(recipe):
        raise RecipeError(
            f"{problem}, and the dry run, which traces the model's own code, cannot trace this recipe: "
            f"{reason}"
        )


def best_fit(recipe: Recipe, shape: Shape, sizes: Geometry) -> Fit | str:
    """Return the largest micro batch that fits on a GPU shape by the dry run, preferably not tightly; or why
    there is none.

    Memory grows with the micro batch, so that a few of them are traced. The planner is given this function
    (`trace`).

    Raises:
        RecipeError: the dry run cannot trace the recipe, or its libraries are not installed.
    """
    _require(recipe, str(sizes.unsupported))
    fits = candidates.each(recipe, shape, sizes)
    if isinstance(fits, str):
        return fits
    # Weights are counted exactly, whatever the layers do.
    lacking = next(
        (need for need in fits[-1].needs if sum(need.phases.get(LOAD, {}).values()) > need.available_bytes),
        None,
    )
    if lacking is not None:
        return (
            f"{sum(lacking.phases[LOAD].values()) / GIB:.1f} GiB of {lacking.resource} needed to load, has "
            + (f"{lacking.available_bytes / GIB:.1f}")
        )
    with _config_folder(recipe) as folder:

        @cache
        def traced(index: int) -> Fit:
            fit = fits[index]
            result = dryrun.run(recipe, folder, fit.workload.degrees, fit.workload.micro_batch)
            return replace(
                fit,
                needs=[_need(fit, result), *fit.needs[1:]],
                traced=_describe(recipe, fit, result, is_known=False),
            )

        def is_well(index: int) -> bool:
            traced_fit = traced(index)
            return traced_fit.fits and traced_fit.needs[0].share <= candidates.preferred_share(recipe)

        first = bisect_left(range(len(fits)), True, key=is_well)
        if first < len(fits):
            return traced(first)
        tight = bisect_left(range(len(fits)), True, key=lambda index: traced(index).fits)
        if tight < len(fits):
            return traced(tight)
        need = candidates.scarcest(traced(len(fits) - 1))
    name, size = need.largest
    return (
        f"{candidates.missing(recipe, need)} missing by the {need.engine}, with micro batch "
        f"{fits[-1].workload.micro_batch} ({need.peak_phase}; most of it {name}, {size / GIB:.1f})"
    )


def confirmed(recipe: Recipe, plan: Plan) -> Plan:
    """Return the plan with the dry run's GPU memory, at its micro batch or the largest smaller one that fits.

    Raises:
        RecipeError: the recipe has no dry run; the message says why (8-bit layers, device_map).
        DoesNotFit: not even one sample at a time fits by the dry run.
    """
    shape = shape_named(plan.shape)
    if not shape.is_gpu:
        raise RecipeError(f"--dry-run: {plan.shape} has no GPU, and the dry run is for GPU memory")
    fits = candidates.each(recipe, shape, read_geometry(recipe.model))
    assert not isinstance(fits, str), "it has a plan"
    with _config_folder(recipe) as folder:
        for fit in fits:
            if (micro_batch := fit.workload.micro_batch) > plan.per_device_train_batch_size:
                continue
            traced = dryrun.run(recipe, folder, plan.degrees, micro_batch)
            need = _need(fit, traced)
            if need.share <= candidates.allowed_share(recipe):
                changes: dict[str, Any] = {
                    "per_device_train_batch_size": micro_batch,
                    "gradient_accumulation_steps": fit.workload.accumulation,
                }
                reasons = [*plan.reasons, _describe(recipe, fit, traced)]
                # The disk does not follow from the micro batch, and in the plan it has what samples take.
                disk = [planned for planned in plan.needs if planned.resource == "disk"]
                others = [other if other.resource != "disk" else disk[0] for other in fit.needs[1:]]
                changes |= {
                    "needs": [need, *others],
                    "reasons": reasons,
                    "intervals": planner.intervals_of(fit, plan.steps),
                }
                return plan.model_copy(update=changes)
    raise DoesNotFit(
        f"recipe {recipe.name}: {plan.shape}: {candidates.missing(recipe, need)} missing by the dry run, "
        f"with one sample at a time ({need.peak_phase}, most of it {need.largest[0]}), although it fits by "
        "the closed form: shard or offload more, or lower data.max_length"
    )


@contextmanager
def _config_folder(recipe: Recipe) -> Iterator[Path]:
    """Yield a folder with the model's config.json; where Flytune has the model's sizes, it is written from
    them."""
    if (config := config_json.shipped_config(recipe.model)) is None:
        yield config_file(recipe.model).parent
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder)


def _need(fit: Fit, traced: DryRun) -> Need:
    planned = fit.needs[0]
    beside = {
        phase: {name: table[name] for name in _NOT_TRACED if name in table}
        for phase, table in planned.phases.items()
    }
    first = max(size for phase, size in traced.phases.items() if phase.startswith("first step"))
    phases = dict(planned.phases)
    phases[LOAD] = {"parameters": traced.phases["load"]} | beside[LOAD]
    phases[FIRST_STEP] = {"all of the step's peak": first} | beside[FIRST_STEP]
    phases[STEP] = traced.kinds | beside[STEP]
    # The trace has one micro batch, of rows of text.
    work, states = fit.workload, traced.kinds.get(OPTIMIZER, 0)
    for name, kept, working in (
        (TOWER, towers.kept_bytes(work), towers.working_bytes(work)),
        (VECTORS, contrast.kept_bytes(work), contrast.loss_bytes(work)),
    ):
        for phase, lasting, peak in ((FIRST_STEP, 0, first), (STEP, states, sum(traced.kinds.values()))):
            above_peak = traced.phases["load"] + lasting + working - peak
            if working and (size := round(max(kept, above_peak))) > 0:
                phases[phase][name] = size
    if traced.drawing_bytes:
        phases[DRAW] = {"all of the drawing's peak": traced.drawing_bytes} | beside[DRAW]
    return planned.model_copy(update={"phases": phases, "engine": "dry run"})


def _describe(recipe: Recipe, fit: Fit, traced: DryRun, is_known: bool = True) -> str:
    """Return what the dry run found, beside the closed form where that `is_known` to hold."""
    closed = {
        phase: ", the closed form has "
        f"{sum(size for name, size in table.items() if name not in _NOT_TRACED) / GIB:.2f}"
        for phase, table in fit.needs[0].phases.items()
        if is_known
    }
    module = f", in {traced.peak_module}" if traced.peak_module else ""
    left_out = dryrun.left_out(recipe)
    ignored = f"; {left_out}" if left_out else ""
    return (
        f"dry run: {traced.peak_bytes / GIB:.2f} GiB allocated at most ({traced.peak_phase}{module})"
        + closed.get(STEP, "")
        + (
            f"; {traced.drawing_bytes / GIB:.2f} while answers are drawn" + closed.get(DRAW, "")
            if traced.drawing_bytes
            else ""
        )
        + f"; {traced.seconds:.0f} s{ignored}"
    )
