"""Fields of a recipe that a run, or one of its number of steps, does not carry out: notes on them before the
start."""

import math

from flytune.recipe import schedules
from flytune.recipe.recipe import Recipe
from flytune.sentences import counted


def unused(recipe: Recipe) -> list[str]:
    """Return a sentence for each field that no run of the recipe carries out, whatever its length."""
    training, evaluation, tracking, notify = (
        recipe.training,
        recipe.evaluation,
        recipe.tracking,
        recipe.notify,
    )
    sentences = []
    if warmup := schedules.unused_warmup(training.lr_scheduler_type, training.warmup_steps):
        sentences.append(f"training.{warmup}")
    if not evaluation.tasks:
        sentences += [
            f"evaluation.{name}: is not used: evaluation.tasks has none"
            for name in evaluation.changed("include_path", "apply_chat_template", "task_shards")
        ]
    if not tracking.report_to and tracking.changed("project"):
        sentences.append("tracking.project: is not used: tracking.report_to names no tracker")
    if not recipe.checkpoints.save_steps and recipe.checkpoints.changed("save_total_limit"):
        sentences.append(
            "checkpoints.save_total_limit: is not used: without checkpoints.save_steps none are written"
        )
    if notify.changed("on") and not (notify.email or notify.slack or notify.webhook):
        sentences.append("notify.on: is not used: no webhook, email or slack is named")
    return sentences


def notes(recipe: Recipe, steps: int, samples: int | None = None) -> list[str]:
    """Return a sentence for each field of which a run of `steps` optimizer steps keeps less than it says.

    Args:
        samples: the samples of one epoch; None if they are not known.
    """
    training, run = recipe.training, f"in a run of {counted(steps, 'step')}"
    epochs = steps * training.global_batch_size / samples if samples else None
    notes = unused(recipe)
    if rate := schedules.length_note(training.lr_scheduler_type, training.warmup_steps, steps):
        notes.append(f"training.{rate}")
    if training.max_steps and training.num_train_epochs != 1:
        seen = f", after {epochs:.3g} epochs" if epochs else ""
        notes.append(
            f"training.max_steps: ends the run{seen}; num_train_epochs {training.num_train_epochs:g} is not "
            "used"
        )
    if training.logging_steps > steps:
        notes.append(
            f"training.logging_steps: {training.logging_steps:,} {run}: no loss is logged before the end"
        )
    if _times(recipe.checkpoints.save_steps, steps, epochs) == 0:
        notes.append(
            f"checkpoints.save_steps: {_shown(recipe.checkpoints.save_steps)} {run}: nothing is saved before "
            "the end, and an interruption loses all steps"
        )
    section = recipe.evaluation
    scored = _times(section.eval_steps, steps, epochs)
    if scored == 0:
        notes.append(
            f"evaluation.eval_steps: {_shown(section.eval_steps)} {run}: the model is scored at the end alone"
        )
    patience = section.early_stopping_patience
    if patience is not None and scored is not None and scored <= patience:
        notes.append(
            f"evaluation.early_stopping_patience: {patience} {run}, with {counted(scored, 'evaluation')} "
            f"before the end: training cannot end early (the first of {patience + 1} sets the loss to beat)"
        )
    return notes


def _times(every: float | str | None, steps: int, epochs: float | None) -> int | None:
    """Return how often something is done before the last step; None if it is not asked for, or not known."""
    if every == "epoch":
        return None if epochs is None else max(0, math.ceil(round(epochs, 6)) - 1)
    if every is None or isinstance(every, str):
        return None
    interval = every if isinstance(every, int) else math.ceil(steps * every)
    return (steps - 1) // interval


def _shown(every: object) -> str:
    return f"{every:,}" if isinstance(every, int) else str(every)
