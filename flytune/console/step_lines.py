"""Lines of a training run in a terminal or log: one per logged step, one per held-out loss, one at the end."""

import time

from rich.console import Console

from flytune.records import Step


class StepLines:
    """Printer of the lines of one training run, used by its first process."""

    def __init__(self, first_step: int, last_step: int) -> None:
        """Start the clock of a run that begins after `first_step` steps and ends with step `last_step`."""
        self._first, self._last, self._started = first_step, last_step, time.monotonic()

    def step(self, done: Step) -> None:
        """Print a logged step, and the held-out loss if the model was scored after it."""
        mean = (time.monotonic() - self._started) / (done.step - self._first)
        show(format_step(done, self._last, mean * (self._last - done.step)))
        if done.eval_loss is not None:
            show(f"step {done.step}/{self._last}  held-out loss {number(done.eval_loss)}")

    def end(self, steps: list[Step]) -> None:
        """Print a summary of the logged `steps` of this attempt."""
        done = steps[-1].step - self._first if steps else 0
        text = f"trained {done} {'step' if done == 1 else 'steps'} in {_clock(time.monotonic() - self._started)}"
        if steps:
            most = max(steps, key=lambda step: step.memory_bytes)
            text += f"  loss {number(steps[-1].loss)}  {sum(step.tokens for step in steps):,} tokens  {_gib(most)}"
        show(text)

    def export(self, step: int, loss: float | None) -> None:
        """Print the step whose weights are exported; `loss` is the lowest of all scored steps, None if none was scored."""
        show(f"exports step {step}: {'no step was scored' if loss is None else f'lowest held-out loss {number(loss)}'}")

    def score(self, loss: float, samples: int) -> None:
        """Print the held-out loss of the model before its export."""
        show(f"held-out loss {number(loss)} on {samples} samples")


def show(line: str) -> None:
    """Print a line without wrapping or markup, for any width of the terminal."""
    Console(soft_wrap=True, highlight=False).print(line, markup=False)


def format_step(done: Step, last_step: int, seconds_left: float) -> str:
    """Return `step 3/16 loss 3.91 grad 1.65 lr 9.9e-4 186 tok/s 6.5 GiB eta 1:40`."""
    parts = [f"step {done.step}/{last_step}", f"loss {number(done.loss)}"]
    if done.reward_accuracy is not None and done.reward_margin is not None:
        parts.append(f"reward accuracy {done.reward_accuracy:.0%}  margin {number(done.reward_margin)}")
    if done.grad_norm is not None:
        parts.append(f"grad {number(done.grad_norm)}")
    parts += [f"lr {_rate(done.learning_rate)}", f"{done.tokens_per_second:,.0f} tok/s", _gib(done)]
    return "  ".join([*parts, f"eta {_clock(seconds_left)}"])


def number(value: float) -> str:
    """Return a number with two decimals, or with three significant digits if it is smaller than 0.1."""
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"


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
