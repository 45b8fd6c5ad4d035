"""Confirmation of a plan's GPU memory by the dry run."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flytune.errors import DoesNotFit, RecipeError
from flytune.estimates.memory import GIB
from flytune.hardware import shape_named
from flytune.models import config_file, geometry, read_geometry
from flytune.planning import candidates, dryrun
from flytune.planning.candidates import Fit
from flytune.planning.dryrun import DryRun
from flytune.recipe import Recipe
from flytune.records import Need, Plan
from flytune.records.plan import FIRST_STEP, LOAD, STEP

_NOT_ALLOCATED = ("CUDA context", "NCCL", "fragmentation")


def confirmed(recipe: Recipe, plan: Plan) -> Plan:
    """Return the plan with the dry run's GPU memory, at its micro batch or the largest smaller one that fits.

    Raises:
        RecipeError: the recipe has no dry run; the message says why (quantized layers, DeepSpeed).
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
            traced = dryrun.run(recipe, folder, plan.world_size, micro_batch)
            need = _need(fit.needs[0], traced)
            if need.share <= 1:
                changes = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": fit.workload.accumulation}
                reasons = [*plan.reasons, _describe(recipe, fit, traced)]
                return plan.model_copy(update=changes | {"needs": [need, *fit.needs[1:]], "reasons": reasons})
    raise DoesNotFit(
        f"recipe {recipe.name}: {plan.shape}: {-need.margin_bytes / GIB:.1f} GiB of {need.resource} missing by the dry run, "
        f"with one sample at a time ({need.peak_phase}, most of it {need.largest[0]}), although it fits by the closed form: "
        "shard or offload more, or lower data.max_length"
    )


@contextmanager
def _config_folder(recipe: Recipe) -> Iterator[Path]:
    """Yield a folder with the model's config.json; where Flytune has the model's sizes, it is written from them."""
    if (config := geometry.shipped_config(recipe.model)) is None:
        yield config_file(recipe.model).parent
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder)


def _need(planned: Need, traced: DryRun) -> Need:
    beside = {phase: {name: table[name] for name in _NOT_ALLOCATED if name in table} for phase, table in planned.phases.items()}
    first = max(size for phase, size in traced.phases.items() if phase.startswith("first step"))
    phases = dict(planned.phases)
    phases[LOAD] = {"parameters": traced.phases["load"]} | beside[LOAD]
    phases[FIRST_STEP] = {"all of the step's peak": first} | beside[FIRST_STEP]
    phases[STEP] = traced.kinds | beside[STEP]
    return planned.model_copy(update={"phases": phases, "engine": "dry run"})


def _describe(recipe: Recipe, fit: Fit, traced: DryRun) -> str:
    table = fit.needs[0].phases[STEP]
    closed = sum(size for name, size in table.items() if name not in _NOT_ALLOCATED)
    ignored = f"; {said}" if (said := dryrun.left_out(recipe)) else ""
    return (
        f"dry run: {traced.peak_bytes / GIB:.2f} GiB allocated at most ({traced.peak_phase}, in {traced.peak_module}), the "
        f"closed form has {closed / GIB:.2f}; {traced.seconds:.0f} s{ignored}"
    )
