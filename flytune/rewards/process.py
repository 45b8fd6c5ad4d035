"""The process that computes rewards, seen from the one that asks it."""

import json
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from flytune import json_core
from flytune.errors import RewardError
from flytune.recipe import Grpo
from flytune.recipe.rewards import as_json
from flytune.rewards import walls

_WORKER = Path(__file__).with_name("worker.py")
_START_SECONDS = 30.0


class Judged(NamedTuple):
    """A completion that rewards judge."""

    prompt: Any
    """Prompt as the data has it: text, or messages."""
    completion: str
    fields: dict[str, Any]
    """Columns of its row."""
    where: str
    """Name of the row, for messages."""


def walls_of(section: Grpo) -> list[str]:
    """Return what a plan says of the walls around code of rewards and answers, of which there are none on
    some machines."""
    running = [reward for reward in section.rewards if reward.code is not None or reward.name == "unit_tests"]
    reason = walls.missing() if running else None
    if reason is None:
        return []
    names = ", ".join(reward.name for reward in running)
    refused = [reward.name for reward in running if reward.code is None and not reward.accept_no_wall]
    end = (
        "a run here ends before it trains, unless accept_no_wall: true is beside its name"
        if refused
        else "that is accepted"
    )
    return [
        f"objective.rewards: {names}: this machine's kernel has no walls around their code ({reason}); {end}"
    ]


class RewardProcess:
    """A process behind the kernel's walls and with limits, which computes a recipe's rewards; it ends with
    its parent."""

    def __init__(self, section: Grpo) -> None:
        self._section, self._seconds = section, section.reward_seconds
        self._rewards = json_core.load(as_json(section.rewards))
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None
            walls.hide_memory(False)

    def values(self, items: Sequence[Judged]) -> list[list[float]]:
        """Return for each completion the value of each reward, in the recipe's order.

        Raises:
            RewardError: a reward raises, returns no finite number, or takes too long or too much memory; says
                for which row.
        """
        if not items:
            return []
        values_of_rewards = self._asked(items)
        for reward, values in zip(self._section.rewards, values_of_rewards, strict=True):
            if reason := values[-1].get("no_walls"):
                raise RewardError(
                    f"objective.rewards: code of answers would run for {reward.name}, and nothing of the "
                    f"kernel would hold it back here: {reason}. Run it where there is a newer kernel, or "
                    "accept that an answer may do what this process may: write accept_no_wall: true beside "
                    "its name"
                )
            if "error" in values[-1]:
                item = items[len(values) - 1]
                raise RewardError(
                    f"reward {reward.name}: {values[-1]['error']}; {item.where}, completion "
                    f"{item.completion!r:.120}. A reward must return a number for any completion: mend it, "
                    "or remove the row; nothing goes on until then"
                )
        return [[values[place]["value"] for values in values_of_rewards] for place in range(len(items))]

    def _asked(self, items: Sequence[Judged]) -> list[list[dict[str, Any]]]:
        sent = [
            {"prompt": item.prompt, "completion": item.completion, "fields": item.fields} for item in items
        ]
        request = json.dumps({"rewards": self._rewards, "seconds": self._seconds, "items": sent})
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            most = len(self._rewards) * len(items) * (self._seconds + 1) + _START_SECONDS
            until, answer = time.monotonic() + most, ""
            if select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                answer = process.stdout.readline()
            answers: list[list[dict[str, Any]]] = json_core.load(answer, len(answer))
        except (OSError, ValueError) as error:
            self.close()
            raise RewardError(
                "the process that computes rewards ended, or gave no answer; usually memory ran out. The run "
                "does not go on"
            ) from error
        return answers

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
            # This process has the run's secrets in its memory and environment.
            walls.hide_memory()
            # Without this process's environment, which has secrets, and without a site's and a user's own
            # start-up files.
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-B", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                text=True,
                encoding="utf-8",
            )
        return self._process
