"""Guards of a run: losses that are NaN or spikes, and weights that do not change.

After a bad loss the run stops, or skips the data and resumes from its last checkpoint. The loss that the
Trainer logs is the mean over all processes, so that all of them see the same and do the same.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

from flytune.data import Stream
from flytune.errors import BadLoss, TrainingError
from flytune.recipe import Training
from flytune.records import Step
from flytune.sentences import counted
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
        # A loss with a margin is 0 for batches that are all beyond it: then there is no usual loss.
        if usual <= 0 or loss <= self._limit * usual:
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


MOST_ZERO = 10
"""Optimizer steps in a row without a gradient that stop a run. Losses with a margin (hinge) may have one such
step: a batch whose pairs are all beyond it."""
MOST_OVERFLOWED = 100
"""Optimizer steps in a row whose float16 gradients overflowed that stop a run: its scale is halved after
each, or each second one, and is below 1 after 34."""
NOTHING = 1e-12
"""Largest value of a trained weight that counts as 0: the change of a result is below float32's resolution of
1e-7."""
_CHUNK = 2**24
_ADVICE = (
    "Look at what the loss is multiplied with (objective.beta, loss_weights, training.learning_rate, "
    "warmup_steps, max_grad_norm), at method.lora_dropout and method.target_modules, whether the answers of "
    "the data have tokens, and whether the rewards of drawn answers differ"
)


class LearningGuard:
    """Check that a run's steps have gradients, and that they change its weights. All processes see the same
    norms."""

    def __init__(self) -> None:
        self._norms: list[Any] = []
        self._zero = self._overflowed = 0
        self._before: list[int] | None = None

    def begin(self, trainer: Any) -> None:
        """Note the trained weights of a run that has trained no step yet; a resumed one has changed them
        already."""
        self._before = _sums(trainer.model) if trainer.state.global_step == 0 else None

    def count(self, norm: Any) -> None:
        """Note the norm of an optimizer step's gradients: a number, a tensor of one, or None where it is not
        known."""
        self._norms.append(norm)

    def check(self, step: int) -> None:
        """Check the steps since the last check, of which `step` is the last; copies their norms from the GPU.

        Raises:
            TrainingError: none of the last MOST_ZERO steps had a gradient, or all of the last MOST_OVERFLOWED
                overflowed.
        """
        norms, self._norms = [float(norm) for norm in self._norms if norm is not None], []
        for at, norm in enumerate(norms, step - len(norms) + 1):
            self._zero = self._zero + 1 if norm == 0 else 0
            self._overflowed = 0 if math.isfinite(norm) else self._overflowed + 1
            if self._zero >= MOST_ZERO:
                raise TrainingError(
                    f"step {at}: the gradients of the last {MOST_ZERO} steps were 0, so the run learns "
                    f"nothing; it does not continue and nothing is stored. {_ADVICE}"
                )
            if self._overflowed >= MOST_OVERFLOWED:
                raise TrainingError(
                    f"step {at}: the float16 gradients of the last {MOST_OVERFLOWED} steps overflowed at "
                    "every scale, so no step changed a weight; the run does not continue and nothing is "
                    "stored. Use model.dtype: bfloat16, or float32"
                )

    def end(self, trainer: Any, steps: Iterable[Step]) -> None:
        """Check a run that has ended. Every process calls it.

        Args:
            steps: its logged steps, those of earlier attempts included.

        Raises:
            TrainingError: no step had a gradient, or the trained weights are those that it began with.
        """
        steps = list(steps)
        norms = [step.grad_norm for step in steps if step.grad_norm is not None]
        if norms and not any(norm > 0 and math.isfinite(norm) for norm in norms):
            raise TrainingError(
                f"the gradients of all {counted(len(norms), 'logged step was', 'logged steps were')} "
                f"{'0' if not any(norms) else 'overflows'}, so the run "
                f"learned nothing; nothing is stored. {_ADVICE}"
            )
        before, self._before = self._before, None
        if before is None or not trainer.state.global_step:
            return
        if steps and not any(
            step.learning_rate for step in steps
        ):  # a budget ended the run at the first step of its warm-up
            return
        if not any(gathered(_sums(trainer.model) != before, trainer.args)):
            raise TrainingError(
                f"{counted(trainer.state.global_step, 'step')} changed no weight: each is as before "
                f"training, so the run learned nothing; nothing is stored. {_ADVICE}"
            )


def _sums(model: Any) -> list[int]:
    """Return the sum of the bits of each trained weight, of this process's part of it."""
    return [_sum(part) for part in _parts(model)]


def _parts(model: Any) -> Iterator[Any]:
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        # ZeRO-3 has the process's part of a parameter in `ds_tensor`; FSDP in a DTensor.
        part = getattr(parameter, "ds_tensor", parameter).detach()
        yield part.to_local() if hasattr(part, "to_local") else part


def _sum(part: Any) -> int:
    import torch

    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()]
    flat, total = part.reshape(-1), 0
    # In chunks: a copy of a table of embeddings may not fit beside the model.
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        bits = torch.where(chunk.abs() <= NOTHING, 0.0, chunk).to(chunk.dtype).contiguous().view(integer)
        total += int(bits.sum(dtype=torch.int64))
    return total
