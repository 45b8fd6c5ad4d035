"""The page of a run that trains: its steps so far, which the report of the artifact replaces."""

from collections.abc import Sequence
from html import escape

from flytune.records import Step

_WIDTH, _HEIGHT = 640, 160
_POINTS = 240


def page(name: str, steps: Sequence[Step], last: int) -> str:
    """Return the page of a run with at least one logged step, of `last` steps."""
    done = steps[-1]
    hours = (
        (last - done.step)
        * done.seconds
        / max(1, done.step - (steps[-2].step if len(steps) > 1 else 0))
        / 3600
    )
    rows = {
        "step": f"{done.step} of {last}",
        "loss": f"{done.loss:.4f}",
        "held-out loss": next(
            (f"{step.eval_loss:.4f}" for step in reversed(steps) if step.eval_loss is not None), "not scored"
        ),
        "tokens per second": f"{done.tokens_per_second:,.0f}",
        "hours left": f"{hours:.2f}",
    }
    table = "".join(f"<tr><th align=left>{key}</th><td>{value}</td></tr>" for key, value in rows.items())
    return f"<h2>{escape(name)} trains</h2><table>{table}</table>{_curve(steps, last)}"


def _curve(steps: Sequence[Step], last: int) -> str:
    """Draw the losses as SVG; matplotlib would be imported beside the training."""
    drawn = steps[:: max(1, len(steps) // _POINTS)]
    losses = [step.loss for step in drawn]
    low, high = min(losses), max(losses)
    spread = (high - low) or 1.0
    points = " ".join(
        f"{_WIDTH * step.step / max(last, 1):.1f},{_HEIGHT * (1 - (step.loss - low) / spread):.1f}"
        for step in drawn
    )
    label = f"Loss by step, from {losses[0]:.4f} to {losses[-1]:.4f}"
    line = f'<polyline points="{points}" fill="none" stroke="#0072b2" stroke-width="1.5"/>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{label}">{line}</svg>'
    )
