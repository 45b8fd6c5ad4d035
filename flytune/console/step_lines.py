"""Lines of a training run in a terminal or log: one per logged step, one per eval_loss, and those of the
end."""

import time
from collections.abc import Sequence

from rich.console import Console

from flytune.records import Figure, MeasuredFigure, Step, TrainingResult
from flytune.records.figures import LOSS
from flytune.sentences import counted


class StepLines:
    """Printer of the lines of one training run, used by its first process."""

    def __init__(
        self, first_step: int, last_step: int, scored: int = 0, figures: Sequence[Figure] = (LOSS,)
    ) -> None:
        """Start the clock of a run that begins after `first_step` steps and ends with step `last_step`.

        Args:
            scored: number of held-out samples that eval_loss is of.
            figures: those of the steps (TrainingResult.figures).
        """
        self._first, self._last, self._started = first_step, last_step, time.monotonic()
        self._figures = figures
        self._unit = next(
            (f" {figure.unit}" for figure in figures if figure.step == "loss" and figure.unit), ""
        )
        self._of = f" of {counted(scored, 'held-out sample')}" if scored else ""

    def step(self, done: Step) -> None:
        """Print a logged step, and its eval_loss if the model was scored after it."""
        mean = (time.monotonic() - self._started) / (done.step - self._first)
        show(format_step(done, self._last, mean * (self._last - done.step), self._figures))
        if done.eval_loss is not None:
            show(f"step {done.step}/{self._last}  eval_loss {number(done.eval_loss)}{self._unit}{self._of}")

    def end(self, steps: list[Step]) -> None:
        """Print a summary of those of the logged `steps` that this attempt has trained."""
        steps = [step for step in steps if step.step > self._first]
        done = steps[-1].step - self._first if steps else 0
        text = (
            f"trained {done} {'step' if done == 1 else 'steps'} in {_clock(time.monotonic() - self._started)}"
        )
        if steps:
            text += f"  loss {number(steps[-1].loss)}  {_sums(steps)}"
        show(f"{text}; steps 1 to {self._first} are of earlier attempts" if self._first else text)

    def total(self, result: TrainingResult) -> None:
        """Print the figures of all attempts, if there were several."""
        if len(result.attempts) > 1 and result.steps:
            again = f"  {result.repeated_steps} trained again" if result.repeated_steps else ""
            steps = (
                f"{counted(len(result.attempts), 'attempt')}: {counted(result.steps[-1].step, 'step')} in "
                f"{_clock(result.seconds)}"
            )
            show(f"{steps}{again}  {_sums(result.steps)}")

    def export(self, step: int, last_step: int, loss: float | None, remark: str) -> None:
        """Print the step whose weights are exported, with its eval_loss if it was scored, and a remark on
        it."""
        scored = "not scored" if loss is None else f"eval_loss {number(loss)}{remark}"
        show(f"exports step {step} of {last_step}: {scored}")

    def score(self, loss: float, samples: int, unit: str) -> None:
        """Print the loss of the exported weights that the gate compares with, on the first held-out
        samples."""
        show(
            f"gate loss {number(loss)}, {unit}, of the first {counted(samples, 'held-out sample')}: the "
            "export must have the same"
        )


def show(line: str) -> None:
    """Print a line without wrapping or markup, for any width of the terminal."""
    Console(soft_wrap=True, highlight=False).print(line, markup=False)


def format_step(done: Step, last_step: int, seconds_left: float, figures: Sequence[Figure] = (LOSS,)) -> str:
    """Return `step 3/16 loss 3.91 grad 1.65 lr 9.9e-4 186 tok/s 6.5 GiB eta 1:40`, with all figures of a
    step."""
    parts = [f"step {done.step}/{last_step}", f"loss {number(done.loss)}"]
    values = [(figure, getattr(done, figure.step)) for figure in figures if figure.step != "loss"]
    parts += [f"{figure.title} {_value(figure, value)}" for figure, value in values if value is not None]
    if done.grad_norm is not None:
        parts.append(f"grad {number(done.grad_norm)}")
    parts += [f"lr {_rate(done.learning_rate)}", f"{done.tokens_per_second:,.0f} tok/s", _gib(done)]
    return "  ".join([*parts, f"eta {_clock(seconds_left)}"])


def format_figure(figure: MeasuredFigure) -> str:
    """Return `held-out loss  base 3.68  tuned 3.43 nats per token`."""
    base = f"  base {_value(figure, figure.base.value)}" if figure.base else ""
    return f"held-out {figure.title}{base}  tuned {shown(figure, figure.tuned.value)}"


def shown(figure: Figure, value: float) -> str:
    """Return a value of a figure with its unit: `0.65 nats per pair`, `62%`."""
    return _value(figure, value) if figure.is_share else f"{_value(figure, value)} {figure.unit}".rstrip()


def _value(figure: Figure, value: float) -> str:
    return f"{value:.0%}" if figure.is_share else number(value)


def number(value: float) -> str:
    """Return a number with two decimals, or with three significant digits if it is smaller than 0.1."""
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"


def _sums(steps: list[Step]) -> str:
    """Return tokens and peak memory of steps."""
    return (
        f"{counted(sum(step.tokens for step in steps), 'token')}  "
        f"{_gib(max(steps, key=lambda step: step.memory_bytes))}"
    )


def _rate(value: float) -> str:
    """Return a rate as `9.9e-4`, or `0`."""
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}" if value else "0"


def _gib(done: Step) -> str:
    return f"{done.memory_bytes / 2**30:.1f} GiB"


def _clock(seconds: float) -> str:
    """Return a time as `1:40`, or from one hour on as `2:01:40`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
