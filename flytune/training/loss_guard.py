"""A loss that is no number, or jumps: the run stops, or leaves the data out and goes back to its last checkpoint.

The loss that the Trainer logs is the mean over all processes, so that all of them see the same and do the same.
"""

import math
from collections import deque
from collections.abc import Callable
from statistics import median

from flytune.data.order import Stream
from flytune.errors import BadLoss
from flytune.recipe.sections import Training
from flytune.training import attempt_notes
from flytune.training.attempt_notes import Notes

WINDOW, FEWEST = 16, 4
"""Of logged losses: a jump is held against the median of the last 16, and never against fewer than 4."""
MOST_ROLLBACKS = 3
"""More would cost more than a look at the recipe."""


class LossGuard:
    """Looks at every logged step."""

    def __init__(self, training: Training | None = None, can_overflow: bool = False) -> None:
        self._limit = training.max_loss_jump if training else None
        self._skips = training is not None and training.on_bad_loss == "skip"
        self._can_overflow = can_overflow
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._place, self._kept, self._writes = "", Notes(), False
        self._stream: Stream | None = None

    def keep(self, place: str, kept: Notes, stream: Stream, writes: bool) -> None:
        """Where steps that are left out are noted, and by whom (one process)."""
        self._place, self._kept, self._stream, self._writes = place, kept, stream, writes

    def check(self, step: int, saved_step: Callable[[], int], loss: float, grad_norm: float | None) -> None:
        """Takes one logged step; `saved_step` tells the last that a whole checkpoint has, once it is asked.

        Raises:
            BadLoss: recoverable where the recipe leaves such steps out.
        """
        if problem := self._problem(loss, grad_norm):
            raise self._error(step, saved_step(), problem)
        self._recent.append(loss)

    def _problem(self, loss: float, grad_norm: float | None) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        # float16's gradients overflow now and then: its scaler leaves the step out, and lowers the scale.
        if grad_norm is not None and not math.isfinite(grad_norm) and not self._can_overflow:
            return f"the gradients' norm is {grad_norm}, and the weights are ruined"
        if self._limit is None or len(self._recent) < FEWEST:
            return None
        usual = median(self._recent)
        if loss <= self._limit * usual:
            return None
        return (
            f"the loss is {loss:.4g}, {loss / usual:.1f} times the usual {usual:.4g} (training.max_loss_jump {self._limit:g})"
        )

    def _error(self, step: int, saved_step: int, problem: str) -> BadLoss:
        advice = "Lower training.learning_rate, or look at the data of this step; float16 overflows where bfloat16 does not"
        if not self._skips or self._stream is None:
            return BadLoss(f"step {step}: {problem}; the run does not go on and nothing is stored. {advice}")
        if self._kept.rollbacks >= MOST_ROLLBACKS:
            return BadLoss(
                f"step {step}: {problem}; data was left out {MOST_ROLLBACKS} times already, and the run does not go on. "
                f"{advice}"
            )
        ruined = [self._stream.batch_of(number) for number in range(saved_step, step)]
        if self._writes:
            left_out = sorted({*self._kept.left_out, *ruined})
            attempt_notes.write(
                self._place, self._kept.model_copy(update={"left_out": left_out, "rollbacks": self._kept.rollbacks + 1})
            )
        back = f"step {saved_step}" if saved_step else "the beginning"
        return BadLoss(
            f"step {step}: {problem}; the next attempt goes back to {back} and leaves out the data of steps {saved_step + 1} "
            f"to {step} (training.on_bad_loss: skip)",
            goes_on=True,
        )
