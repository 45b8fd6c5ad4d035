"""What a training run did, step by step, as it happens."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flytune.console.step_lines import StepLines
from flytune.data.collator import tokens_of
from flytune.errors import TrainingError
from flytune.records.plan import EVALUATE, FIRST_STEP, SAVE, STEP
from flytune.records.training import STEPS, Step
from flytune.sharding import ShardingBase
from flytune.training import step_timer, trackers
from flytune.training.eval_loss import Scorer
from flytune.training.loss_guard import LossGuard
from flytune.training.memory_peaks import Peaks


class Recorder:
    """Collects the run's steps as the Trainer logs them, and has the live model scored between them."""

    def __init__(self, strategy: ShardingBase, scorer: Scorer | None = None) -> None:
        self.steps: list[Step] = []
        self.trainer: Any = None
        """Set once it is built: callbacks are built before it."""
        self.strategy, self.scorer = strategy, scorer
        self.guard = LossGuard()
        self.saved_step: Callable[[], int] = lambda: 0
        """Of the last checkpoint; whoever saves says it."""
        self.peaks = Peaks()
        self._eval_loss: float | None = None
        self._tokens = 0
        """Of this process since the last logged step, padding not counted."""

    def begin(self, done: int) -> None:
        """Training begins, after `done` steps of an earlier attempt. Only now is the model wrapped.

        Raises:
            TrainingError: the strategy's sharding did not take hold; the run would train wrong or not fit.
        """
        args = self.trainer.args
        if problem := self.strategy.check(self.trainer):
            raise TrainingError(f"rank {args.process_index}: sharding {self.strategy.name} did not take hold: {problem}")
        self.file = Path(args.output_dir) / STEPS
        if self.trainer.is_world_process_zero():
            _cut(self.file, done)
            self._lines = StepLines(done, self.trainer.state.max_steps)
        self.clock = step_timer.Clock(on_gpu=args.device.type == "cuda")
        step_timer.watch(self.trainer, self.clock)
        self._count_tokens()
        self._watch_memory()

    def _watch_memory(self) -> None:
        save = self.trainer._save_checkpoint

        def watched(*args: Any, **kwargs: Any) -> None:
            with self.peaks.during(SAVE):
                save(*args, **kwargs)

        self.trainer._save_checkpoint = watched
        self.peaks.enter(FIRST_STEP)

    def _count_tokens(self) -> None:
        # TRL's num_tokens counts one row of a packed batch, with its padding.
        fetch = self.trainer.get_batch_samples

        def counted(*args: Any, **kwargs: Any) -> Any:
            batches, items = fetch(*args, **kwargs)
            self._tokens += sum(int(tokens_of(batch)) for batch in batches)
            return batches, items

        self.trainer.get_batch_samples = counted

    def end_step(self, step: int, is_last: bool) -> bool:
        """An optimizer step is over; says whether the live model was scored after it."""
        self.clock.enter("other")
        if self.peaks.phase == FIRST_STEP:
            self.peaks.enter(STEP)
        if self.scorer is None or not self.scorer.is_due(step, is_last):
            return False
        self.clock.enter("eval")
        with self.peaks.during(EVALUATE):
            self._eval_loss = self.scorer.score(self.trainer)
        self.clock.enter("other")
        return True

    def record(self, step: int, epoch: float, logs: dict[str, float]) -> None:
        """Takes one log line of the Trainer, and adds to it what it knows beyond.

        Raises:
            BadLoss: the loss is not a number, or jumps; going on would only cost money.
        """
        if "loss" not in logs:
            return
        self.guard.check(step, self.saved_step, logs["loss"], logs.get("grad_norm"))
        parts, tokens = self.clock.read(), self._all_tokens()
        seconds = sum(parts.values())
        held, reserved = self.peaks.read()
        done = Step(
            step=step,
            epoch=epoch,
            loss=logs["loss"],
            eval_loss=self._eval_loss,
            learning_rate=logs["learning_rate"],
            grad_norm=logs.get("grad_norm"),
            seconds=seconds,
            data_seconds=parts["data"],
            forward_seconds=parts["forward"],
            backward_seconds=parts["backward"],
            update_seconds=parts["update"],
            eval_seconds=parts["eval"],
            tokens=tokens,
            tokens_per_second=tokens / (seconds - parts["eval"]),
            memory_bytes=held,
            memory_reserved_bytes=reserved,
        )
        self._tokens, self._eval_loss = 0, None
        self.steps.append(done)
        logs |= done.model_dump(exclude_none=True, exclude={"step", "epoch", "tokens"})
        if self.trainer.is_world_process_zero():
            # Closed after each line: what is logged outlives the process.
            with self.file.open("a", encoding="utf-8") as file:
                file.write(done.model_dump_json() + "\n")
            self._lines.step(done)

    def end(self) -> None:
        """Note that training is over; the last score and the export follow."""
        if self.trainer.is_world_process_zero():
            self._lines.end(self.steps)

    def score(self, loss: float, samples: int) -> None:
        """Take the held-out loss of the model that is exported."""
        if self.trainer.is_world_process_zero():
            self._lines.score(loss, samples)

    def _all_tokens(self) -> int:
        import torch

        mine = torch.tensor([self._tokens], device=self.trainer.args.device)
        return int(self.trainer.accelerator.reduce(mine, reduction="sum"))

    def all_peaks(self) -> dict[str, dict[str, int]]:
        """By phase, of the process that held most: as TrainingResult has them. Every process asks."""
        from accelerate.utils import gather_object

        self.peaks.read()
        mine = [{"peaks": self.peaks.bytes, "reserved_peaks": self.peaks.reserved}]
        found = gather_object(mine)
        return {kind: {phase: max(one[kind].get(phase, 0) for one in found) for phase in mine[0][kind]} for kind in mine[0]}

    def finish(self, out: Path) -> None:
        """The first process, once the run is over and exported: steps.jsonl moves to `out`, trackers are closed."""
        shutil.move(self.file, out / STEPS)
        trackers.finish(self.trainer.args.report_to)


def callback(recorder: Recorder) -> Any:
    """The recorder as the Trainer knows it."""
    from transformers import PrinterCallback, TrainerCallback

    class Recording(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # From now on the first: trackers report what it adds to the logs.
            callbacks = recorder.trainer.callback_handler.callbacks
            callbacks.remove(self)
            callbacks.insert(0, self)
            # It prints the logs as they are.
            recorder.trainer.remove_callback(PrinterCallback)
            recorder.begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if recorder.end_step(state.global_step, is_last=state.global_step >= state.max_steps):
                control.should_log = True

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
            recorder.record(state.global_step, state.epoch or 0.0, {} if logs is None else logs)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.end()

    return Recording()


def _cut(file: Path, done: int) -> None:
    """Leaves the lines of the first `done` steps: the others are trained again, or were another run's."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    file.write_text("".join(line for line in lines if _step_of(line) <= done), encoding="utf-8")


def _step_of(line: str) -> int:
    try:
        return Step.model_validate_json(line).step
    except ValidationError:
        # Cut off when the process was killed.
        return sys.maxsize
