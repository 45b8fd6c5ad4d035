"""Runs that learn nothing: gradients that are 0, and weights that are the same after training."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from flytune.errors import TrainingError
from flytune.records import Step
from flytune.sentences import counted
from flytune.training.checkpoints.resume import gathered

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
