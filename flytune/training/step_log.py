"""Log of a run's steps, written as they happen: steps.jsonl, the printed lines, and the numbers for
trackers."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from flytune.console.step_lines import StepLines
from flytune.data import tokens_of
from flytune.errors import TrainingError
from flytune.objectives.bound import BoundRecipe
from flytune.records import Step, TrainingResult
from flytune.records.plan import EVALUATE, FIRST_STEP, STEP
from flytune.records.training import LIVE, STEPS
from flytune.schema import RecordError
from flytune.training import loss_check, measurements, trackers
from flytune.training.eval_loss import Scorer
from flytune.training.measurements import GpuMonitor, Peaks
from training_estimates.degrees import Degrees


class Recorder:
    """Recorder of the run's steps as the Trainer logs them; scores the live model between them."""

    def __init__(
        self,
        bound: BoundRecipe,
        degrees: Degrees,
        scorer: Scorer,
        peaks: Peaks,
        gpu_monitor: GpuMonitor,
    ) -> None:
        self.steps: list[Step] = []
        """Logged steps of all attempts, each once."""
        objective = bound.objective
        figures = [figure for figure in objective.figures() if figure.step]
        self.figures = sorted(figures, key=lambda figure: figure.step != "loss")
        """Figures of the objective in each step; the loss that is trained is the first."""
        self._logged, self._rewards = objective.logged, objective.logged_rewards()
        self.sharding, self._degrees, self._scorer, self._peaks, self._gpu_monitor = (
            bound.sharding,
            degrees,
            scorer,
            peaks,
            gpu_monitor,
        )
        self.eval_loss: float | None = None
        """Held-out loss after the step that is being recorded; None if the model was not scored after it."""
        self._tokens = 0
        """Tokens that this process read since the last logged step, padding not counted."""

    def resume(self, steps: list[Step]) -> None:
        """Continue after the steps in a checkpoint's log."""
        self.steps = [*steps]

    def begin(self, trainer: Any) -> None:
        """Begin to record the steps of a trainer, whose model is wrapped by now.

        Raises:
            TrainingError: the sharding did not take effect, or the loss is not the model's own; the run would
                train wrong or not fit.
        """
        args, self._trainer = trainer.args, trainer
        if problem := self.sharding.check(trainer):
            raise TrainingError(
                f"rank {args.process_index}: sharding {self.sharding.name} did not take effect: {problem}"
            )
        loss_check.check(trainer)
        self.file = Path(args.output_dir) / STEPS
        self._first = trainer.state.global_step
        self._scorer.begin(trainer.state.max_steps)
        if trainer.is_world_process_zero():
            _cut(self.file, self._first)
            if pointer := os.environ.get(LIVE):
                Path(pointer).write_text(str(self.file), encoding="utf-8")
            self._lines = StepLines(
                self._first, trainer.state.max_steps, len(self._scorer.rows), self.figures
            )
            if args.device.type == "cuda":
                self._gpu_monitor.begin()
        self.clock = measurements.Clock(on_gpu=args.device.type == "cuda")
        if trainer.is_deepspeed_enabled:
            measurements.time_engine(trainer.model_wrapped, self.clock)
        self._peaks.enter(FIRST_STEP)

    def count_tokens(self, batches: list[Any]) -> None:
        """Add the tokens of micro batches; TRL's num_tokens counts one row of a packed batch, with its
        padding."""
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
            rewards={name: logs[key] for name, key in self._rewards.items() if logs.get(key) is not None},
            **{field: logs.get(name) for field, name in self._logged.items()},
            gpu=self._gpu_monitor.read(),
        )
        self._tokens, self.eval_loss = 0, None
        self.steps.append(done)
        logs |= done.model_dump(exclude_none=True, exclude={"step", "epoch", "tokens", "gpu", "rewards"})
        # TRL's count begins anew with each attempt, with the padding of packed rows.
        logs["num_tokens"] = sum(step.tokens for step in self.steps)
        if done.gpu:
            logs |= {f"gpu/{name}": value for name, value in done.gpu.model_dump(exclude_none=True).items()}
        if self._trainer.is_world_process_zero():
            # Closed after each line, so that the line survives the process.
            with self.file.open("a", encoding="utf-8") as file:
                file.write(done.model_dump_json() + "\n")
            self._lines.step(done)

    def summarize(self, logs: dict[str, float]) -> None:
        """Replace the Trainer's summary of this attempt, which trackers show as the run's, by that of all
        attempts."""
        steps, first = self.steps, self._first
        if (
            not first or not steps or steps[0].step > first
        ):  # from the start, or without the log of the steps before
            return
        seconds, ends = sum(step.seconds for step in steps), [0, *(step.step for step in steps)]
        share = logs["train_runtime"] / seconds * ends[-1] / max(1, ends[-1] - first)
        logs |= {name: logs[name] * share for name in ("train_samples_per_second", "train_steps_per_second")}
        losses = [step.loss * (step.step - before) for step, before in zip(steps, ends, strict=False)]
        logs |= {"train_runtime": seconds, "train_loss": sum(losses) / ends[-1]}

    def end(self) -> None:
        """Print the end of training; the last score and the export follow."""
        if self._trainer.is_world_process_zero():
            self._lines.end(self.steps)

    def eval_loss_of(self, step: int) -> float | None:
        """Return the eval_loss of a logged step; None if it was not scored."""
        return next((done.eval_loss for done in self.steps if done.step == step), None)

    def export(self, step: int, loss: float | None, since: int | None) -> None:
        """Print the step whose weights are exported, and its eval_loss.

        Args:
            since: step after which all scores are of the same held-out samples, if the lowest was looked for.
        """
        if self._trainer.is_world_process_zero():
            remark = "" if since is None or loss is None else _compared(self.steps, step, loss, since)
            self._lines.export(step, self._trainer.state.global_step, loss, remark)

    def score(self, loss: float, samples: int, unit: str) -> None:
        """Print the loss that the gate compares the exported model's with."""
        if self._trainer.is_world_process_zero():
            self._lines.score(loss, samples, unit)

    def _all_tokens(self) -> int:
        import torch

        mine = torch.tensor([self._tokens], device=self._trainer.args.device)
        return int(self._trainer.accelerator.reduce(mine, reduction="sum")) // self._degrees.copies

    def finish(self, out: Path, result: TrainingResult) -> None:
        """Print the run's figures, move steps.jsonl to `out` and close the trackers; the first process calls
        it at the end."""
        self._lines.total(result)
        shutil.move(self.file, out / STEPS)
        trackers.finish(self._trainer.args.report_to)


def _compared(steps: list[Step], exported: int, loss: float, since: int) -> str:
    """Return how the exported step's eval_loss, the lowest that a checkpoint was found of, compares with
    those of all steps."""
    scored = [
        (step.step, step.eval_loss) for step in steps if step.eval_loss is not None and step.step != exported
    ]
    lower = [f"step {step} had {value:.4f}" for step, value in scored if step > since and value < loss]
    parts = [f"the lowest of the complete checkpoints ({', '.join(lower)})" if lower else "the lowest"]
    if any(step <= since for step, _ in scored):
        parts.append(f"steps up to {since} were scored otherwise, and are not compared")
    return ", " + "; ".join(parts)


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
