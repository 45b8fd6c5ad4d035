"""The ledger of rollouts: what a model has drawn in each step, beside the run's checkpoints.

A step's file is written at once, after its completions were judged and before the step trains them: an
attempt that finds the file of a step trains what it says, and draws nothing, if the keys in it are its own:
they are of all that completions and rewards follow from. A line of JSON is a prompt with its group of
completions.
"""

import logging
from collections.abc import Mapping, Sequence

from flytune.errors import TrainingError
from flytune.records.rollouts import Group
from flytune.schema import RecordError
from flytune.storage import Storage

log = logging.getLogger(__name__)

FOLDER = "rollouts"
_SAMPLED_STEPS = 20
"""Steps of which an artifact has rollouts, over the whole run."""
_SAMPLED_GROUPS = 2


class RolloutLedger:
    """The rollouts of one run, at the address of its checkpoints."""

    def __init__(self, address: str) -> None:
        self._storage = Storage(address)

    def read(
        self, step: int, prompts: Sequence[Sequence[int]], made_by: Mapping[str, str]
    ) -> list[Group] | None:
        """Return the groups of a step; None if there are none, or they are not of `prompts` or not `made_by`
        the same.

        The log has a line on those that are not used.

        Raises:
            TrainingError: the file is damaged.
        """
        name = _name(step)
        try:
            content = self._storage.read(name)
        except FileNotFoundError:
            return None
        try:
            groups = [Group.parse(line) for line in content.decode().splitlines()]
        except (ValueError, RecordError) as error:
            raise TrainingError(
                f"{self._storage.where}/{name}: no rollouts of a step: {' '.join(str(error).split())[:200]}; "
                "delete the file, and the step draws again"
            ) from None
        if [group.prompt for group in groups] == [list(prompt) for prompt in prompts]:
            others = {
                part for group in groups for part, key in made_by.items() if group.made_by.get(part) != key
            }
        else:
            others = {"rows"}
        if not others:
            return groups
        log.warning(
            "step %d: the answers in %s/%s are of other %s than this run's; they are drawn and judged again",
            step,
            self._storage.where,
            name,
            " and ".join(sorted(others)),
        )
        return None

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Store the groups of a step; a reader sees all of them or none."""
        lines = "".join(group.model_dump_json() + "\n" for group in groups)
        self._storage.write(_name(step), lines.encode())

    def clear(self) -> None:
        """Delete the rollouts of all steps."""
        self._storage.remove(FOLDER)

    def sample(self, last: int) -> str:
        """Return lines of JSON of some groups of the steps up to `last`, for an artifact."""
        steps = sorted(
            {1 + round(place * (last - 1) / max(1, _SAMPLED_STEPS - 1)) for place in range(_SAMPLED_STEPS)}
        )
        sampled = list[str]()
        for step in (step for step in steps if 1 <= step <= last):
            try:
                lines = self._storage.read(_name(step)).decode().splitlines()
            except FileNotFoundError:
                continue
            sampled += lines[:_SAMPLED_GROUPS]
        return "".join(line + "\n" for line in sampled)


def _name(step: int) -> str:
    return f"{FOLDER}/{step:08}.jsonl"
