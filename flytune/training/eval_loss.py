"""Held-out loss of the model in training, over all processes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flytune.data import heldout_rows, read_manifest, row_kind
from flytune.models import Row
from flytune.objectives import FILLER, ObjectiveBase
from flytune.objectives.bound import BoundRecipe
from flytune.training.reference import Reference
from training_estimates.degrees import Degrees


class Scorer:
    """Scorer of the model in training, every evaluation.eval_steps steps or epoch, and after the last; never
    if it is unset."""

    def __init__(
        self, bound: BoundRecipe, dataset: Path, degrees: Degrees, reference: Reference | None = None
    ) -> None:
        """Read the first evaluation.max_samples held-out samples; raises DataError where there is none to
        score."""
        evaluation = bound.recipe.evaluation
        self.eval_steps, self._objective, self._degrees = evaluation.eval_steps, bound.objective, degrees
        rows = scored_rows(dataset, evaluation.max_samples, reference) if self.eval_steps else []
        joined = self._objective.joined()
        self.rows = [joined(row, rows[place - 1]) for place, row in enumerate(rows)] if joined else rows

    def begin(self, steps: int) -> None:
        """Make a number of a share of all the run's `steps`, as transformers does of save_steps."""
        if isinstance(self.eval_steps, float):
            self.eval_steps = math.ceil(steps * self.eval_steps)

    def is_due(self, step: int, is_last: bool, ends_epoch: bool) -> bool:
        """Return whether the model is scored after a step, which may be the run's last, or the one that ends
        an epoch."""
        if self.eval_steps == "epoch":
            return is_last or ends_epoch
        return isinstance(self.eval_steps, int) and (is_last or step % self.eval_steps == 0)

    def score(self, trainer: Any) -> float:
        """Return the objective's loss: in nats per trained token, or that of a pair. Every process calls
        it."""
        return live_loss(trainer, self._degrees, self.rows, self._objective)


def scored_rows(dataset: Path, limit: int, reference: Reference | None = None) -> list[Row]:
    """Return those of the first `limit` held-out samples that can be scored, with the reference's
    log-probabilities: samples with a token to score; of kinds of rows whose labels are not what is trained,
    all.

    Raises:
        DataError: the data set is incomplete, or has no such sample.
    """
    rows = heldout_rows(dataset, limit)
    rows = reference.beside_heldout(rows) if reference else rows
    return row_kind(read_manifest(dataset).row_kind).scored(rows)


def live_loss(trainer: Any, degrees: Degrees, rows: Sequence[Row], objective: ObjectiveBase) -> float:
    """Return the mean loss of an objective on `rows`, by their weights; every process calls it and gets the
    same.

    Rows are scored one at a time: training's memory may leave no room for more.

    Each row is scored by one process. All make the same number of forward passes, since these gather
    parameters (ZeRO-3, FSDP) and a process with one pass fewer would leave the others waiting for ever:
    shorter shares are filled up with a row that is not counted. `rows` are those of `scored_rows`: without a
    token to score there would be no forward pass.
    """
    import torch

    share = list(rows[degrees.rows(trainer.args.process_index)])
    is_short = len(share) < len(rows[degrees.rows(0)])
    losses, weights = objective.measure(trainer, [*share, rows[0] | {FILLER: True}] if is_short else share)
    counted = [losses[: len(share)].sum(), weights[: len(share)].sum()]
    mine = torch.tensor(counted, dtype=torch.float64, device=trainer.args.device)
    total, weight = trainer.accelerator.reduce(mine, reduction="sum").tolist()
    return float(total / weight)
