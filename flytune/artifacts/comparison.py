"""Comparison of a plan with what its run measured."""

from flytune.recipe import Recipe
from flytune.records import Comparison, Manifest, Plan, Step, TrainingResult
from flytune.records.training import highest

_OUTSIDE = ("CUDA context", "NCCL", "fragmentation")
"""Components of planned GPU memory that torch does not allocate, so that the measured peak does not contain
them."""


def compare(recipe: Recipe, plan: Plan, manifest: Manifest, training: TrainingResult) -> Comparison:
    """Return the plan's estimates with the measured values."""
    is_gpu = plan.memory.resource == "GPU memory"
    left_out = _OUTSIDE if is_gpu else ()
    planned = {
        phase: sum(size for name, size in table.items() if name not in left_out)
        for phase, table in plan.memory.phases.items()
    }
    # An attempt on other machines, or with another micro batch, is not what was planned.
    attempts = [attempt for attempt in training.attempts if attempt.is_of(plan)]
    measured = [_steady(training.steps_of(attempt), attempt.resumed_from_step) for attempt in attempts]
    if not training.attempts:
        measured = [_steady(training.steps, training.first_step)]
    steps, taken = [step for part, _ in measured for step in part], sum(count for _, count in measured)
    seconds = sum(step.seconds - step.eval_seconds for step in steps)
    return Comparison(
        recipe=recipe.name,
        shape=plan.shape,
        full_length=recipe.data.packing
        or (recipe.training.probe_longest and manifest.longest >= recipe.data.max_length),
        planned_bytes=planned,
        measured_bytes=highest([attempt.peaks for attempt in attempts])
        if training.attempts
        else training.peaks,
        planned_step_seconds=sum(plan.step_seconds.values()) or None,
        measured_step_seconds=seconds / taken if taken else 0.0,
        planned_tokens_per_second=plan.tokens_per_second[1] if plan.tokens_per_second else None,
        measured_tokens_per_second=sum(step.tokens for step in steps) / seconds if seconds > 0 else 0.0,
        calibration=plan.calibration,
    )


def _steady(steps: list[Step], first: int) -> tuple[list[Step], int]:
    """Return the logged steps of an attempt without its first, if there are others, and the number of steps
    that they cover.

    A logged step may cover several; the first one covers those since step `first`.
    """
    kept = steps[1:] or steps
    return kept, kept[-1].step - (steps[0].step if steps[1:] else first) if kept else 0
