"""When a run saves, and how it stops when its machine is taken back or its budget is used up: all processes at the same step.

SIGTERM only sets a flag; at the end of each step the processes agree by one all-reduce of five numbers.
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
from flytune.hardware.shapes import Shape
from flytune.planning import save_interval
from flytune.planning.budget import Budget
from flytune.recipe.sections import Checkpoints
from flytune.training.checkpoints import Saver

log = logging.getLogger(__name__)

GRACE_SECONDS = 30.0
"""From SIGTERM to SIGKILL: torchelastic's, which cannot be configured, and Kubernetes' own unless a pod says otherwise."""
FIRST_SAVE = 2
"""With save_steps `auto`, the step after which a save is first made and measured; the first step is slower than others."""


class Agreed(NamedTuple):
    """The largest of all processes; negative where none has it."""

    since_signal: float
    save_seconds: float
    """That training stops for."""
    store_seconds: float
    """That storing takes after it."""
    since_save: float
    spent: float
    """Of training, all attempts together."""


class Stopper:
    """Decides at each step's end, the same on every process."""

    def __init__(self, checkpoints: Checkpoints, shape: Shape, budget: Budget | None = None) -> None:
        self._budget, self._began = budget, time.monotonic()
        self.spent_before = 0.0
        """Seconds of earlier attempts, as the checkpoint that is gone on from has them."""
        self.stopped_early: str | None = None
        """That the budget is used up, in words."""
        self._saves, self._auto = checkpoints.save_steps is not None, checkpoints.save_steps == "auto"
        self._per_hour = save_interval.interruptions_per_hour(shape)
        self._signalled: float | None = None
        self._save_seconds = -1.0
        self._last = time.monotonic()
        self._steps_run = False
        self._interval: float | None = None
        self._stopped: str | None = None
        self.done = 0
        """Steps trained, earlier attempts' included."""
        self._saver: Saver | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM is this object's within; Python has signals in the main thread alone."""
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
        lost = f"steps {self.saved_step + 1} to {self.done} are" if self.done > self.saved_step else "no step is"
        start = f"step {self.saved_step}" if self.saved_step else "the beginning"
        return f"SIGTERM after step {self.done}: {why}; {lost} lost, the next attempt goes on from {start}"

    @property
    def is_signalled(self) -> bool:
        """Return whether SIGTERM has come."""
        return self._signalled is not None

    @property
    def saved_step(self) -> int:
        """Of the last checkpoint that is known to be whole."""
        return self._saver.saved_step if self._saver else 0

    def spent(self) -> float:
        """Seconds of training so far, all attempts together."""
        return self.spent_before + time.monotonic() - self._began

    def is_used_up(self, step: int, args: Any) -> bool:
        """Whether the budget is, before a step after `step` is trained; every process calls it, all get the same."""
        return self._budget is not None and self._ends_budget(step, _largest(Agreed(-1, -1, -1, -1, self.spent()), args))

    def _ends_budget(self, step: int, agreed: Agreed) -> bool:
        if self._budget is None or agreed.spent < self._budget.seconds:
            return False
        self.stopped_early = f"{self._budget.describe(step, agreed.spent)}; what there is is exported and evaluated"
        log.warning("%s", self.stopped_early)
        return True

    def begin(self, trainer: Any, saver: Saver, done: int) -> None:
        """The steps begin, after `done` of an earlier attempt's checkpoint."""
        self.done, self._saver = done, saver
        self._steps_run, self._last = True, time.monotonic()
        save = trainer._save_checkpoint

        def timed(*args: Any, **kwargs: Any) -> None:
            started = time.monotonic()
            save(*args, **kwargs)
            self._last = time.monotonic()
            self._save_seconds = max(self._save_seconds, self._last - started)

        trainer._save_checkpoint = timed

    def end_step(self, step: int, args: Any, is_last: bool = False) -> tuple[bool, bool]:
        """Whether to save, and whether to stop, after a step; every process calls it."""
        self.done, now = step, time.monotonic()
        since = now - self._signalled if self._signalled else -1.0
        stored = self._saver.store_seconds if self._saver else 0.0
        agreed = _largest(Agreed(since, self._save_seconds, stored, now - self._last, self.spent()), args)
        if agreed.since_signal < 0 and not is_last and self._ends_budget(step, agreed):
            return self._saves, True
        if agreed.since_signal < 0:
            return self._is_due(step, agreed), False
        left = GRACE_SECONDS - agreed.since_signal
        if (takes := agreed.save_seconds + agreed.store_seconds) > left:
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
            if agreed.save_seconds + agreed.store_seconds > GRACE_SECONDS:
                log.warning("a save takes longer than the %.0f s after a SIGTERM: a preemption loses steps", GRACE_SECONDS)
        return agreed.since_save >= self._interval

    def end(self) -> None:
        """The steps are over.

        Raises:
            Preempted: they were ended by SIGTERM.
        """
        self._steps_run = False
        if self._stopped and self._saves and self.saved_step < self.done and "lost" not in self._stopped:
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


def callback(stopper: Stopper, trainer: Any, saver: Saver) -> Any:
    """The stopper as the Trainer knows it."""
    from transformers import TrainerCallback

    class Stopping(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stopper.begin(trainer, saver, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            save, stop = stopper.end_step(state.global_step, args, is_last=state.global_step >= state.max_steps)
            control.should_save = (control.should_save and not stop) or save
            # So that the log that is saved ends with this step.
            control.should_log = control.should_log or save or stop
            control.should_training_stop = control.should_training_stop or stop

    return Stopping()
