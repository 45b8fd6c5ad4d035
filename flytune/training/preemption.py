"""Preemption, automatic saves, budgets and early stopping: all processes save and stop at the same step.

SIGTERM only sets a flag; at the end of each step the processes agree by one all-reduce of seven numbers.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from flytune.errors import Preempted
from flytune.hardware import Shape
from flytune.planning import Budget, save_interval
from flytune.recipe import Checkpoints, Evaluation
from flytune.training.checkpoints import Saver
from flytune.training.early_stopping import EarlyStopping

log = logging.getLogger(__name__)

GRACE_SECONDS = 30.0
"""Seconds from SIGTERM to SIGKILL: torchelastic's, which cannot be configured, and Kubernetes' default."""
FIRST_SAVE = 2
"""First step that save_steps `auto` saves and measures; the step before it is slower than others."""


_NO_EVALUATION = Evaluation()


class Agreed(NamedTuple):
    """Largest values over all processes; negative where no process has one."""

    since_signal: float
    save_seconds: float
    """Seconds that a save blocks training."""
    store_seconds: float
    """Seconds that storing a checkpoint takes after the save."""
    since_save: float
    spent: float
    """Seconds of training, all attempts together."""
    early: float = -1.0
    """1 if early stopping is due."""
    bare_save_seconds: float = -1.0
    """save_seconds without gathering weights to publish, which a save after SIGTERM leaves out."""


class Stopper:
    """Decision after each step whether to save and stop, the same on every process."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        shape: Shape,
        saver: Saver,
        budget: Budget | None = None,
        evaluation: Evaluation = _NO_EVALUATION,
    ) -> None:
        self._saver, self._budget, self._began = saver, budget, time.monotonic()
        self.early = EarlyStopping(evaluation)
        self.early_stopping: str | None = None
        """Sentence on the early stopping that ended the run; None where it did not."""
        self.stopped_early: str | None = None
        """Sentence on the budget that ended the run; None where none did."""
        self._saves, self._auto = checkpoints.save_steps is not None, checkpoints.save_steps == "auto"
        self._per_hour = save_interval.interruptions_per_hour(shape)
        self._signalled: float | None = None
        self._save_seconds = self._bare_save_seconds = -1.0
        self._gather_seconds = 0.0
        self._last = time.monotonic()
        self._steps_run = False
        self._interval: float | None = None
        self._stopped: str | None = None
        self.done = 0
        """Number of steps trained, including earlier attempts'."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM in the block. In other threads than the main one, Python has no signals, and this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signalled = self._signalled or time.monotonic()
        if not (self._saves and self._steps_run):
            raise Preempted(self._lost("there is nothing to save" if self._saves else "checkpoints.save_steps is not set"))

    def _lost(self, why: str) -> str:
        saved = self._saver.saved_step
        lost = f"steps {saved + 1} to {self.done} are" if self.done > saved else "no step is"
        start = f"resumes from step {saved}" if saved else "starts at the beginning"
        return f"SIGTERM after step {self.done}: {why}; {lost} lost, the next attempt {start}"

    @property
    def is_signalled(self) -> bool:
        """Return whether SIGTERM has arrived."""
        return self._signalled is not None

    def spent(self) -> float:
        """Return the seconds of training so far, all attempts together."""
        return self._saver.resumed_seconds + time.monotonic() - self._began

    def has_ended(self, step: int, args: Any) -> bool:
        """Return whether budget or early stopping had ended the run after `step`, the one that it resumes from.

        Every process calls it, and all get the same.
        """
        is_early = self.early.is_due and step < args.max_steps
        agreed = _largest(Agreed(-1, -1, -1, -1, self.spent(), float(is_early)), args)
        return self._ends_early(step, agreed) or self._ends_budget(step, agreed)

    def _ends_early(self, step: int, agreed: Agreed) -> bool:
        if agreed.early <= 0:
            return False
        self.early_stopping = self.early.describe(step)
        log.info("%s", self.early_stopping)
        return True

    def _ends_budget(self, step: int, agreed: Agreed) -> bool:
        if self._budget is None or agreed.spent < self._budget.seconds:
            return False
        self.stopped_early = f"{self._budget.describe(step, agreed.spent)}; the model is exported and evaluated as it is"
        log.warning("%s", self.stopped_early)
        return True

    def begin(self, done: int) -> None:
        """Begin the steps, after `done` steps of an earlier attempt's checkpoint."""
        self.done, self._steps_run, self._last = done, True, time.monotonic()

    @contextmanager
    def timing_save(self) -> Iterator[None]:
        """Measure how long a save blocks training."""
        started, self._gather_seconds = time.monotonic(), 0.0
        yield
        self._last = time.monotonic()
        self._save_seconds = max(self._save_seconds, self._last - started)
        self._bare_save_seconds = max(self._bare_save_seconds, self._last - started - self._gather_seconds)

    @contextmanager
    def timing_gather(self) -> Iterator[None]:
        """Measure how long a save gathers weights to publish."""
        started = time.monotonic()
        yield
        self._gather_seconds = time.monotonic() - started

    def end_step(self, step: int, args: Any, is_last: bool = False) -> tuple[bool, bool]:
        """Return whether to save and whether to stop after a step. Every process calls it."""
        self.done, now = step, time.monotonic()
        since = now - self._signalled if self._signalled else -1.0
        since_save, is_early = now - self._last, float(self.early.is_due)
        mine = Agreed(
            since, self._save_seconds, self._saver.store_seconds, since_save, self.spent(), is_early, self._bare_save_seconds
        )
        agreed = _largest(mine, args)
        if agreed.since_signal < 0 and not is_last and (self._ends_early(step, agreed) or self._ends_budget(step, agreed)):
            return self._saves, True
        if agreed.since_signal < 0:
            return self._is_due(step, agreed), False
        left = GRACE_SECONDS - agreed.since_signal
        if (takes := agreed.bare_save_seconds + agreed.store_seconds) > left:
            self._stopped = self._lost(f"a save takes {takes:.1f} s, {left:.1f} of {GRACE_SECONDS:.0f} s are left")
            return False, True
        self._stopped = f"SIGTERM: step {step} is saved, {left:.1f} s of {GRACE_SECONDS:.0f} were left for it"
        return self._saves, True

    def _is_due(self, step: int, agreed: Agreed) -> bool:
        if not self._auto:
            return False
        if agreed.save_seconds < 0:
            return step >= FIRST_SAVE
        if self._interval is None:
            self._interval = save_interval.best_interval(agreed.save_seconds, self._per_hour)
            text = "a save takes %.1f s, and %.2g interruptions an hour are expected: the next is due after %.0f s"
            log.info(text, agreed.save_seconds, self._per_hour, self._interval)
            if agreed.bare_save_seconds + agreed.store_seconds > GRACE_SECONDS:
                log.warning("a save takes longer than the %.0f s after a SIGTERM: a preemption loses steps", GRACE_SECONDS)
        return agreed.since_save >= self._interval

    def end(self) -> None:
        """End the steps.

        Raises:
            Preempted: SIGTERM ended them.
        """
        self._steps_run = False
        if self._stopped and self._saves and self._saver.saved_step < self.done and "lost" not in self._stopped:
            self._stopped = self._lost("its last checkpoint was not stored in time")
        if self._stopped:
            raise Preempted(f"rank {os.environ.get('RANK', '0')}: {self._stopped}")


def _largest(mine: Agreed, args: Any) -> Agreed:
    if args.world_size == 1:
        return mine
    import torch

    numbers = torch.tensor(mine, device=args.device)
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
    return Agreed(*numbers.tolist())
