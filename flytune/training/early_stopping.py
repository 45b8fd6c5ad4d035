"""Early stopping: the end of training after several evaluations in a row that did not find a lower
eval_loss."""

import math
from collections.abc import Iterable

from flytune.recipe import Evaluation
from flytune.records import Step
from flytune.sentences import counted


class EarlyStopping:
    """Count of evaluations without a lower eval_loss, as transformers' EarlyStoppingCallback counts them.

    That callback and the metric that it compares with are set by the Trainer's own evaluation, which Flytune
    does not use.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self._patience, self._threshold = (
            evaluation.early_stopping_patience,
            evaluation.early_stopping_threshold,
        )
        self.best: tuple[int, float] | None = None
        """Step of the lowest eval_loss so far, and that loss."""
        self.counter = 0
        """Number of evaluations since one that was lower by more than the threshold."""

    def resume(self, steps: Iterable[Step]) -> None:
        """Count the evaluations of the steps in a checkpoint's log."""
        for step in steps:
            if step.eval_loss is not None:
                self.count(step.step, step.eval_loss)

    def count(self, step: int, loss: float) -> None:
        """Count one evaluation, of the model after `step`. The comparison is with the lowest loss, however
        little it fell."""
        is_lower = not math.isnan(loss) and (self.best is None or loss < self.best[1])
        improves = is_lower and (self.best is None or self.best[1] - loss > self._threshold)
        self.counter = 0 if improves else self.counter + 1
        if is_lower:
            self.best = step, loss

    @property
    def is_due(self) -> bool:
        """True if training is to end."""
        return self._patience is not None and self.counter >= self._patience

    def describe(self, step: int) -> str:
        """Return a sentence on the end of training after `step`."""
        lowest = f"{self.best[1]:.4f}, at step {self.best[0]}" if self.best else "no number"
        often = counted(self.counter, "evaluation")
        by = f" by more than {self._threshold:g}" if self._threshold else ""
        return (
            f"evaluation.early_stopping_patience: {often} in a row did not lower eval_loss{by} (lowest: "
            f"{lowest}); training ended after step {step}"
        )
