"""Stops of a run before its last step: preemption, Ctrl-C, budgets and early stopping; and automatic saves.

SIGTERM only sets a flag; at the end of each step the processes agree by one all-reduce of seven numbers, so
that all save and stop at the same step.

Python runs a signal's handler between two instructions of the main thread: one that waits for a process
group, a store or a disk in C runs none, for as long as that waits. The number of the signal arrives in a pipe
at once (UnheardSignals).
"""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

from flytune import process_setup
from flytune.console import step_lines
from flytune.errors import Preempted
from flytune.failures import reports
from flytune.hardware import Shape
from flytune.planning import Budget, save_interval
from flytune.pods.spec import GRACE_SECONDS
from flytune.recipe import Checkpoints, Evaluation
from flytune.records import Step
from flytune.sentences import counted
from flytune.training.checkpoints import Saver

UNHEARD_SECONDS = 2.0
"""Seconds from a signal that its handler has to run."""


class UnheardSignals:
    """Context in which a process ends by itself if the handlers of SIGTERM and SIGINT do not run; of the main
    thread alone."""

    def __init__(self, end: Callable[[int], None]) -> None:
        """Call `end` with the number of a signal that was not heard, in another thread; then the process
        exits."""
        self._end, self._heard, self._over = end, threading.Event(), False
        self._ends: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "UnheardSignals":
        if (other := signal.set_wakeup_fd(-1)) != -1:  # an event loop's
            signal.set_wakeup_fd(other)
            return self
        os.register_at_fork(after_in_child=self._leave_to_parent)
        self._ends = list(os.pipe())
        os.set_blocking(self._ends[1], False)
        signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            if callable(before):
                self._before[number] = before
                signal.signal(number, self._hear)
        threading.Thread(target=self._listen, args=[self._ends[0]], name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave signals to their handlers alone."""
        if not self._ends or self._over:
            return
        self._over = True
        self._heard.set()
        signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, before)
        os.close(self._ends[1])  # which ends the thread

    def _leave_to_parent(self) -> None:
        # A signal of a forked process would arrive in the same pipe.
        if not self._over:
            signal.set_wakeup_fd(-1)

    def _hear(self, number: int, frame: Any) -> None:
        self._heard.set()
        self._before[number](number, frame)

    def _listen(self, end: int) -> None:
        while number := os.read(end, 1):
            if number[0] in self._before and not self._heard.wait(UNHEARD_SECONDS):
                self._end(number[0])
                os._exit(128 + number[0])
        os.close(end)


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


log = logging.getLogger(__name__)

AGAIN_SECONDS = 2.0
"""Seconds after a Ctrl-C from which on it is a second one: a rank gets it from the terminal, and from torch's
launcher."""
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
        self._unheard: UnheardSignals | None = None
        self._signalled: float | None = None
        self._interrupted: float | None = None
        self._on_ctrl_c: Any = None
        """Handler of SIGINT before and after the steps; None where this process has no signals."""
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
        """Handle SIGTERM in the block, and Ctrl-C in its steps; do nothing in other threads than the main
        one."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, self._on_ctrl_c = (
            signal.signal(signal.SIGTERM, process_setup.outside_logging(self._on_signal)),
            signal.getsignal(signal.SIGINT),
        )
        try:
            with UnheardSignals(self._end_unheard) as self._unheard:
                yield
        finally:
            signal.signal(signal.SIGTERM, before)
            self._listen_to_ctrl_c(is_on=False)
            self._on_ctrl_c = None

    def _listen_to_ctrl_c(self, *, is_on: bool) -> None:
        if self._on_ctrl_c is not None:
            handler = process_setup.outside_logging(self._on_interrupt) if is_on else self._on_ctrl_c
            signal.signal(signal.SIGINT, handler)

    def _end_unheard(self, number: int) -> None:
        """Say why the process ends, whose main thread has not heard a signal before the first step."""
        if number == signal.SIGINT:
            os.write(2, b"\nCtrl-C: the run was still waiting to begin; no step of it was trained\n")
            return
        error = Preempted(self._lost("the run was still waiting to begin"))
        reports.report(failure := reports.of_error(error, int(os.environ.get("RANK", "0"))))
        os.write(2, f"{failure}\n".encode(errors="replace"))

    def _on_signal(self, number: int, frame: object) -> None:
        self._signalled = self._signalled or time.monotonic()
        if not (self._saves and self._steps_run):
            raise Preempted(
                self._lost("there is nothing to save" if self._saves else "checkpoints.save_steps is not set")
            )

    def _on_interrupt(self, number: int, frame: object) -> None:
        """Note the first Ctrl-C of the steps, if they are saved; end at once at the next one, and where they
        are not."""
        now = time.monotonic()
        if self._interrupted is None and self._saves:
            self._interrupted, self._signalled = now, self._signalled or now
            if os.environ.get("RANK", "0") == "0":
                # A print may be what the signal has interrupted; its stream cannot be entered again.
                os.write(
                    2, b"\nCtrl-C: this step is completed and saved; press Ctrl-C again to end without\n"
                )
        elif self._interrupted is None or now - self._interrupted > AGAIN_SECONDS:
            raise KeyboardInterrupt

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
        """Return whether budget or early stopping had ended the run after `step`, the one that it resumes
        from.

        Every process calls it, and all get the same.
        """
        is_early = self.early.is_due and step < args.max_steps
        agreed = _largest(Agreed(-1, -1, -1, -1, self.spent(), float(is_early)), args)
        return self._ends_early(step, agreed) or self._ends_budget(step, agreed)

    def _ends_early(self, step: int, agreed: Agreed) -> bool:
        if agreed.early <= 0:
            return False
        self.early_stopping = self.early.describe(step)
        _show(self.early_stopping)
        return True

    def _ends_budget(self, step: int, agreed: Agreed) -> bool:
        if self._budget is None or agreed.spent < self._budget.seconds:
            return False
        self.stopped_early = (
            f"{self._budget.describe(step, agreed.spent)}; the model is exported and evaluated as it is"
        )
        _show(self.stopped_early)
        return True

    def begin(self, done: int) -> None:
        """Begin the steps, after `done` steps of an earlier attempt's checkpoint."""
        if self._unheard is not None:
            self._unheard.stop()
        self.done, self._steps_run, self._last = done, True, time.monotonic()
        self._listen_to_ctrl_c(is_on=True)

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
            since,
            self._save_seconds,
            self._saver.store_seconds,
            since_save,
            self.spent(),
            is_early,
            self._bare_save_seconds,
        )
        agreed = _largest(mine, args)
        if (
            agreed.since_signal < 0
            and not is_last
            and (self._ends_early(step, agreed) or self._ends_budget(step, agreed))
        ):
            return self._saves, True
        if agreed.since_signal < 0:
            return self._is_due(step, agreed), False
        # After a Ctrl-C, nothing kills a process that has no launcher.
        left = math.inf if self._interrupted and args.world_size == 1 else GRACE_SECONDS - agreed.since_signal
        if (takes := agreed.bare_save_seconds + agreed.store_seconds) > left:
            self._stopped = self._lost(
                f"a save takes {takes:.1f} s, {left:.1f} of {GRACE_SECONDS:.0f} s are left"
            )
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
            _show(
                f"checkpoints: a save takes {agreed.save_seconds:.1f} s, and {self._per_hour:.2g} "
                f"interruptions an hour are expected: one every {self._interval:,.0f} s"
            )
            if agreed.bare_save_seconds + agreed.store_seconds > GRACE_SECONDS:
                log.warning(
                    "a save takes longer than the %.0f s after a SIGTERM: a preemption loses steps",
                    GRACE_SECONDS,
                )
        return agreed.since_save >= self._interval

    def end(self) -> None:
        """End the steps.

        Raises:
            KeyboardInterrupt: Ctrl-C ended them.
            Preempted: SIGTERM ended them.
        """
        self._steps_run = False
        self._listen_to_ctrl_c(is_on=False)
        if self._interrupted:
            raise KeyboardInterrupt
        if (
            self._stopped
            and self._saves
            and self._saver.saved_step < self.done
            and "lost" not in self._stopped
        ):
            self._stopped = self._lost("its last checkpoint was not stored in time")
        if self._stopped:
            raise Preempted(f"rank {os.environ.get('RANK', '0')}: {self._stopped}")


def _show(line: str) -> None:
    """Print a line, in the first process alone: all of them decide the same."""
    if os.environ.get("RANK", "0") == "0":
        step_lines.show(line)


def _largest(mine: Agreed, args: Any) -> Agreed:
    if args.world_size == 1:
        return mine
    import torch

    numbers = torch.tensor(mine, device=args.device)
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
    return Agreed(*numbers.tolist())
