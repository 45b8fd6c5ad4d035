"""Log of a run's steps, written as they happen: steps.jsonl, the printed lines, and the numbers for trackers."""

import shutil
import sys
from pathlib import Path
from typing import Any

from flytune.console.step_lines import StepLines
from flytune.data import tokens_of
from flytune.errors import TrainingError
from flytune.records import Step
from flytune.records.plan import EVALUATE, FIRST_STEP, STEP
from flytune.records.training import STEPS
from flytune.schema import RecordError
from flytune.sharding import ShardingBase
from flytune.training import step_timer, trackers
from flytune.training.eval_loss import Scorer
from flytune.training.gpu_monitor import GpuMonitor
from flytune.training.memory_peaks import Peaks


class Recorder:
    """Recorder of the run's steps as the Trainer logs them; scores the live model between them."""

    def __init__(self, sharding: ShardingBase, scorer: Scorer, peaks: Peaks, gpu_monitor: GpuMonitor) -> None:
        self.steps: list[Step] = []
        self.sharding, self._scorer, self._peaks, self._gpu_monitor = sharding, scorer, peaks, gpu_monitor
        self.eval_loss: float | None = None
        """Held-out loss after the step that is being recorded; None if the model was not scored after it."""
        self._tokens = 0
        """Tokens that this process read since the last logged step, padding not counted."""

    def begin(self, trainer: Any) -> None:
        """Begin to record the steps of a trainer, whose model is wrapped by now.

        Raises:
            TrainingError: the sharding did not take effect; the run would train wrong or not fit.
        """
        args, self._trainer = trainer.args, trainer
        if problem := self.sharding.check(trainer):
            raise TrainingError(f"rank {args.process_index}: sharding {self.sharding.name} did not take effect: {problem}")
        self.file = Path(args.output_dir) / STEPS
        if trainer.is_world_process_zero():
            done = trainer.state.global_step
            _cut(self.file, done)
            self._lines = StepLines(done, trainer.state.max_steps)
            if args.device.type == "cuda":
                self._gpu_monitor.begin()
        self.clock = step_timer.Clock(on_gpu=args.device.type == "cuda")
        if trainer.is_deepspeed_enabled:
            step_timer.time_engine(trainer.model_wrapped, self.clock)
        self._peaks.enter(FIRST_STEP)

    def count_tokens(self, batches: list[Any]) -> None:
        """Add the tokens of micro batches; TRL's num_tokens counts one row of a packed batch, with its padding."""
        self._tokens += sum(int(tokens_of(batch)) for batch in batches)

    def end_step(self, step: int, is_last: bool, ends_epoch: bool = False) -> bool:
        """Note that an optimizer step has finished; return whether the live model was scored after it."""
        self.clock.enter("other")
        if self._peaks.phase == FIRST_STEP:
            self._peaks.enter(STEP)
        if not self._scorer.is_due(step, is_last, ends_epoch):
            return False
        self.clock.enter("eval")
        with self._peaks.during(EVALUATE):
            self.eval_loss = self._scorer.score(self._trainer)
        self.clock.enter("other")
        return True

    def record(self, step: int, epoch: float, logs: dict[str, float]) -> None:
        """Record one log line of the Trainer, and add times, tokens, memory and held-out loss to it."""
        parts, tokens = self.clock.read(), self._all_tokens()
        seconds = sum(parts.values())
        held, reserved = self._peaks.read()
        done = Step(
            step=step,
            epoch=epoch,
            loss=logs["loss"],
            eval_loss=self.eval_loss,
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
            # TRL's names; its logs have them where rows are pairs.
            reward_accuracy=logs.get("rewards/accuracies"),
            reward_margin=logs.get("rewards/margins"),
            gpu=self._gpu_monitor.read(),
        )
        self._tokens, self.eval_loss = 0, None
        self.steps.append(done)
        logs |= done.model_dump(exclude_none=True, exclude={"step", "epoch", "tokens", "gpu"})
        if done.gpu:
            logs |= {f"gpu/{name}": value for name, value in done.gpu.model_dump(exclude_none=True).items()}
        if self._trainer.is_world_process_zero():
            # Closed after each line, so that the line survives the process.
            with self.file.open("a", encoding="utf-8") as file:
                file.write(done.model_dump_json() + "\n")
            self._lines.step(done)

    def end(self) -> None:
        """Print the end of training; the last score and the export follow."""
        if self._trainer.is_world_process_zero():
            self._lines.end(self.steps)

    def eval_loss_of(self, step: int) -> float | None:
        """Return the held-out loss of a step that this attempt logged; None if it was not scored."""
        return next((done.eval_loss for done in self.steps if done.step == step), None)

    def export(self, step: int, loss: float | None) -> None:
        """Print the step whose weights are exported, and their held-out loss."""
        if self._trainer.is_world_process_zero():
            self._lines.export(step, loss)

    def score(self, loss: float, samples: int) -> None:
        """Print the held-out loss of the model that is exported."""
        if self._trainer.is_world_process_zero():
            self._lines.score(loss, samples)

    def _all_tokens(self) -> int:
        import torch

        mine = torch.tensor([self._tokens], device=self._trainer.args.device)
        return int(self._trainer.accelerator.reduce(mine, reduction="sum"))

    def finish(self, out: Path) -> None:
        """Move steps.jsonl to `out` and close the trackers; called by the first process after the export."""
        shutil.move(self.file, out / STEPS)
        trackers.finish(self._trainer.args.report_to)


def read(file: Path) -> list[Step]:
    """Read the complete lines of a steps.jsonl; none if there is no such file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Step.parse(line) for line in lines if _step_of(line) < sys.maxsize]


def _cut(file: Path, done: int) -> None:
    """Keep the lines of the first `done` steps: the others are trained again, or belong to another run."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    file.write_text("".join(line for line in lines if _step_of(line) <= done), encoding="utf-8")


def _step_of(line: str) -> int:
    try:
        return Step.parse(line).step
    except RecordError:
        # Incomplete: the process was killed while it wrote.
        return sys.maxsize
