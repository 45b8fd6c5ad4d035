"""Comparison of a plan with what its run measured."""

from flytune.recipe import Recipe
from flytune.records import Comparison, Manifest, Plan, TrainingResult

_OUTSIDE = ("CUDA context", "NCCL", "fragmentation")
"""Components of planned GPU memory that torch does not allocate, so that the measured peak does not contain them."""


def compare(recipe: Recipe, plan: Plan, manifest: Manifest, training: TrainingResult) -> Comparison:
    """Return the plan's estimates with the measured values."""
    is_gpu = plan.memory.resource == "GPU memory"
    left_out = _OUTSIDE if is_gpu else ()
    planned = {
        phase: sum(size for name, size in table.items() if name not in left_out) for phase, table in plan.memory.phases.items()
    }
    steps = training.steps[1:] or training.steps
    seconds = sum(step.seconds - step.eval_seconds for step in steps)
    # A logged step may cover several; the first one covers those since the beginning.
    taken = steps[-1].step - (training.steps[0].step if training.steps[1:] else training.resumed_from_step) if steps else 0
    return Comparison(
        recipe=recipe.name,
        shape=plan.shape,
        full_length=recipe.data.packing or (recipe.training.probe_longest and manifest.longest >= recipe.data.max_length),
        planned_bytes=planned,
        measured_bytes=training.peaks,
        planned_step_seconds=sum(plan.step_seconds.values()) or None,
        measured_step_seconds=seconds / taken if taken else 0.0,
        planned_tokens_per_second=plan.tokens_per_second[1] if plan.tokens_per_second else None,
        measured_tokens_per_second=sum(step.tokens for step in steps) / seconds if seconds > 0 else 0.0,
        calibration=plan.calibration,
    )
