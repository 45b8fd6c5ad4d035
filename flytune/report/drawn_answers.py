"""The report's answers that the model has drawn in training, at some steps side by side."""

from collections.abc import Sequence
from typing import NamedTuple

from flytune.recipe.objectives.base import ObjectiveSection
from flytune.records.rollouts import Group, Rollout

_MOMENTS = 3
_ANSWERS = 4


class Moment(NamedTuple):
    """A prompt of one step with its answers; those with the most reward first, where there are rewards."""

    step: int
    prompt: str
    answers: list["DrawnAnswer"]
    left_out: int
    """Answers of the group that are not shown."""


class DrawnAnswer(NamedTuple):
    """An answer as the report shows it."""

    reward: float | None
    """None where nothing judges answers."""
    parts: str
    """Value of each reward by name; empty if there is one."""
    text: str
    is_truncated: bool


def moments(section: ObjectiveSection, groups: Sequence[Group]) -> list[Moment]:
    """Return the first group of the first, the middle and the last recorded step."""
    first = {group.step: group for group in reversed(groups)}
    steps = sorted(first)
    places = (
        sorted({round(number * (len(steps) - 1) / (_MOMENTS - 1)) for number in range(_MOMENTS)})
        if steps
        else []
    )
    return [_moment(section, first[steps[place]]) for place in places]


def _moment(section: ObjectiveSection, group: Group) -> Moment:
    ranked = sorted(group.completions, key=lambda completion: -section.total(completion.rewards))
    # The best and the worst of a large group.
    shown = ranked if len(ranked) <= _ANSWERS else [*ranked[: _ANSWERS // 2], *ranked[-(_ANSWERS // 2) :]]
    return Moment(
        group.step, group.text, [_answer(section, rollout) for rollout in shown], len(ranked) - len(shown)
    )


def _answer(section: ObjectiveSection, rollout: Rollout) -> DrawnAnswer:
    names = section.reward_names
    named = [f"{name} {value:.3g}" for name, value in zip(names, rollout.rewards, strict=True)]
    return DrawnAnswer(
        section.total(rollout.rewards) if names else None,
        ", ".join(named) if len(named) > 1 else "",
        rollout.text,
        rollout.truncated,
    )
