"""NaN losses and loss spikes: the run stops, or skips the data and resumes from its last checkpoint.

The loss that the Trainer logs is the mean over all processes, so that all of them see the same and do the
same.
"""

import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from flytune.data import Stream
from flytune.errors import BadLoss
from flytune.recipe import Training
from flytune.training.attempt_notes import Notes
from flytune.training.checkpoints.resume import gathered

WINDOW, FEWEST = 16, 4
"""Number of logged losses whose median a loss is compared with: the last 16, and never fewer than 4."""
MOST_ROLLBACKS = 3
"""Largest number of rollbacks; more would cost more than a look at the recipe."""


class LossGuard:
    """Check of every logged step of a run."""

    def __init__(
        self,
        training: Training,
        stream: Stream,
        notes: Notes,
        leave_out: Callable[[list[int], int], None],
        args: Any,
        can_overflow: bool = False,
    ) -> None:
        """Check the losses of a run over `stream`.

        Args:
            training: the recipe's section.
            stream: the run's data.
            notes: the decisions of earlier attempts.
            leave_out: records data that later attempts skip, and how many times data was skipped by now.
            args: the Trainer's arguments.
            can_overflow: gradients may overflow now and then, as float16's do.
        """
        self._limit, self._skips = training.max_loss_jump, training.on_bad_loss == "skip"
        self._stream, self._notes, self._leave_out = stream, notes, leave_out
        self._args, self._can_overflow = args, can_overflow
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def check(self, step: int, saved_step: Callable[[], int], loss: float, grad_norm: float | None) -> None:
        """Check one logged step; `saved_step` returns the step of the newest complete checkpoint.

        Raises:
            BadLoss: the loss is bad; recoverable where the recipe skips such steps.
        """
        if problem := self._problem(loss, grad_norm):
            raise self._error(step, saved_step(), problem)
        self._recent.append(loss)

    def _problem(self, loss: float, grad_norm: float | None) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        # float16's gradients overflow now and then: its scaler skips the step and lowers the scale.
        if grad_norm is not None and not math.isfinite(grad_norm) and not self._can_overflow:
            return f"the gradients' norm is {grad_norm}, and the weights are ruined"
        if self._limit is None or len(self._recent) < FEWEST:
            return None
        usual = median(self._recent)
        if loss <= self._limit * usual:
            return None
        return (
            f"the loss is {loss:.4g}, {loss / usual:.1f} times the usual {usual:.4g} "
            f"(training.max_loss_jump {self._limit:g})"
        )

    def _error(self, step: int, saved_step: int, problem: str) -> BadLoss:
        advice = (
            "Lower training.learning_rate, or look at the data of this step; float16 overflows where "
            "bfloat16 does not"
        )
        if not self._skips:
            return BadLoss(
                f"step {step}: {problem}; the run does not continue and nothing is stored. {advice}"
            )
        if self._notes.rollbacks >= MOST_ROLLBACKS:
            return BadLoss(
                f"step {step}: {problem}; data was skipped {MOST_ROLLBACKS} times already, and the run does "
                f"not continue. {advice}"
            )
        ruined = [self._stream.batch_of(number) for number in range(saved_step, step)]
        if self._args.process_index == 0:
            self._leave_out(sorted({*self._notes.left_out, *ruined}), self._notes.rollbacks + 1)
        # The first failing rank ends the others: all wait for the record.
        gathered(None, self._args)
        back = f"step {saved_step}" if saved_step else "the beginning"
        return BadLoss(
            f"step {step}: {problem}; the next attempt goes back to {back} and skips the data of steps "
            f"{saved_step + 1} to {step} (training.on_bad_loss: skip)",
            goes_on=True,
        )
