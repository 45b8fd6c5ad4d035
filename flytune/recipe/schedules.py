"""The learning rate schedules that recipes name, and the arguments that each of them takes."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flytune import limits
from flytune.sentences import counted

LEAST_WARM = 0.01
"""Least share of the learning rate that a run must reach, if it ends while it still rises."""
_SHAPES = ("linear", "cosine", "1-sqrt")


@dataclass(frozen=True, slots=True)
class Argument:
    """The values of an argument of a schedule."""

    low: float = 0.0
    high: float = limits.COUNT
    integer: bool = False
    above: bool = False
    """True if `low` itself is not allowed."""
    choices: tuple[str, ...] = ()

    def problem(self, value: Any) -> str | None:
        """Return what it should be; None if `value` is one of its values."""
        if self.choices:
            return None if value in self.choices else f"should be one of {', '.join(self.choices)}"
        allowed = f"{'greater than' if self.above else 'at least'} {self.low:g}"
        is_number = isinstance(value, int if self.integer else int | float) and not isinstance(value, bool)
        is_large_enough = is_number and (value > self.low or (value == self.low and not self.above))
        is_too_large = is_number and value > self.high
        if is_large_enough and not is_too_large:
            return None
        if is_too_large or self.high < limits.COUNT:
            allowed += f" and at most {self.high:g}"
        return f"should be {'an integer' if self.integer else 'a number'} {allowed}"


_WAVES = Argument(above=True)
_RATE = Argument(high=1.0)
_COSINE_TO = {"num_cycles": _WAVES, "min_lr": Argument(), "min_lr_rate": _RATE}
_STEPS = Argument(low=1, integer=True)

SCHEDULES: dict[str, dict[str, Argument]] = {
    "linear": {},
    "cosine": {"num_cycles": _WAVES},
    "constant": {},
    "constant_with_warmup": {},
    "cosine_with_restarts": {"num_cycles": Argument(low=1, integer=True)},
    "polynomial": {"lr_end": Argument(), "power": Argument(above=True)},
    "inverse_sqrt": {"timescale": _STEPS},
    "cosine_with_min_lr": _COSINE_TO,
    "cosine_warmup_with_min_lr": _COSINE_TO | {"warmup_lr_rate": _RATE},
    "warmup_stable_decay": {
        "num_decay_steps": _STEPS,
        "num_stable_steps": Argument(integer=True),
        "warmup_type": Argument(choices=_SHAPES),
        "decay_type": Argument(choices=_SHAPES),
        "min_lr_ratio": _RATE,
        "num_cycles": _WAVES,
    },
}
"""Schedules of transformers that need no metric, with the arguments of their functions
(transformers/optimization.py)."""


def problem(name: str, arguments: Mapping[str, Any], learning_rate: float) -> str | None:
    """Return what is wrong with a schedule's `lr_scheduler_kwargs`; None if nothing is."""
    known = SCHEDULES[name]
    for key, value in arguments.items():
        if key not in known:
            takes = f"it takes {', '.join(known) or 'none'}"
            if near := difflib.get_close_matches(key, known, n=1):
                takes = f"did you mean {near[0]}?"
            return f"lr_scheduler_kwargs: {key} is not an argument of {name}; {takes}"
        if wrong := known[key].problem(value):
            return f"lr_scheduler_kwargs: {key} {wrong}; found {value!r:.60}"
    if "min_lr" in known and ("min_lr" in arguments) == ("min_lr_rate" in arguments):
        return (
            f"lr_scheduler_kwargs: {name} needs one of min_lr (a learning rate) and min_lr_rate (a share "
            "of learning_rate)"
        )
    if name == "warmup_stable_decay" and "num_decay_steps" not in arguments:
        return "lr_scheduler_kwargs: warmup_stable_decay needs num_decay_steps, the steps of its last phase"
    end = "lr_end" if name == "polynomial" else "min_lr"
    # 1e-7 is the default of polynomial's lr_end.
    if (name == "polynomial" and arguments.get("lr_end", 1e-7) >= learning_rate) or arguments.get(
        end, 0.0
    ) > learning_rate:
        return f"lr_scheduler_kwargs: {end} should be below learning_rate, {learning_rate:g}"
    return None


def length_problem(name: str, arguments: Mapping[str, Any], warmup_steps: float, steps: int) -> str | None:
    """Return why a schedule does not fit into a run of `steps` optimizer steps; None if it does.

    transformers would begin warmup_stable_decay in the middle of its decay, or end it early at the lowest
    rate.
    """
    warmup = _warmup(warmup_steps, steps)
    # The first step of a warm-up has the rate 0. A warm-up of another kind begins above it.
    if name not in ("constant", "cosine_warmup_with_min_lr") and (steps - 1) < LEAST_WARM * warmup:
        return (
            f"warmup_steps: {warmup_steps:g} is {counted(warmup, 'step')} of warm-up, and the run has "
            f"{steps:,}: its rate would "
            f"reach {(steps - 1) / warmup:.2%} of learning_rate; write fewer, or 0"
        )
    if name != "warmup_stable_decay":
        return None
    stable, decay = arguments.get("num_stable_steps"), arguments["num_decay_steps"]
    parts = warmup + (stable or 0) + decay
    if parts > steps or (stable is not None and parts < steps):
        middle = f" + {stable} stable" if stable is not None else ""
        return (
            f"lr_scheduler_kwargs: {counted(warmup, 'step')} of warm-up{middle} + {decay} of decay, and the "
            f"run has {counted(steps, 'step')}; change "
            "num_decay_steps, or leave num_stable_steps out, which then follows"
        )
    return None


def unused_warmup(name: str, warmup_steps: float) -> str | None:
    """Return that a schedule does not use the recipe's warm-up; None if it does, or there is none."""
    if name != "constant" or not warmup_steps:
        return None
    return (
        f"warmup_steps: {warmup_steps:g} is not used: lr_scheduler_type constant has learning_rate from the "
        "first step on; write constant_with_warmup, or warmup_steps: 0"
    )


def length_note(name: str, warmup_steps: float, steps: int) -> str | None:
    """Return how far a schedule gets that rises until a run of `steps` optimizer steps ends; None if it ends
    later."""
    warmup = _warmup(warmup_steps, steps)
    # A small share of few steps is rounded up to one.
    if name == "constant" or (warmup == 1 and warmup_steps < 1):
        return None
    of_run = (
        f"warmup_steps: {warmup_steps:g} is {counted(warmup, 'step')} of warm-up in a run of "
        f"{counted(steps, 'step')}: the rate"
    )
    if warmup > steps - 1:
        reached = (
            ""
            if name == "cosine_warmup_with_min_lr"
            else f", to {(steps - 1) / warmup:.1%} of learning_rate,"
        )
        return f"{of_run} rises until the end{reached} and never decays; write fewer, or a share (0.03)"
    if warmup == steps - 1 and name != "constant_with_warmup":
        return (
            f"{of_run} reaches learning_rate in the last step and never decays; write fewer, or a share "
            "(0.03)"
        )
    return None


def _warmup(warmup_steps: float, steps: int) -> int:
    # transformers rounds a share of all steps up (TrainingArguments.get_warmup_steps).
    return int(warmup_steps) if warmup_steps >= 1 else -int(-steps * warmup_steps // 1)
