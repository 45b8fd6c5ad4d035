"""Answers that a run has drawn in its steps, in the ledger beside its checkpoints: an attempt that finds
those of a step draws nothing for it."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flytune.records.training import ROLLOUTS
from flytune.rollouts import Group, Rollout, RolloutLedger

LOGGED: Mapping[str, str] = {
    "answer_tokens": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
    "rollout_seconds": "rollout_seconds",
}
"""Name in TRL's logs of each field of a logged step that says something of drawn answers."""


class RecordedSteps:
    """Answers of a run's steps, on one of its processes. What draws them extends it."""

    def __init__(self) -> None:
        self._ledger: RolloutLedger | None = None

    def known(
        self, trainer: Any, step: int, made_by: dict[str, str], prompts: Sequence[Sequence[int]]
    ) -> list[Group] | None:
        """Return the groups that an earlier attempt has recorded for a step; None if there are none, or
        others. All processes call it."""
        from accelerate.utils import broadcast_object_list

        recorded: list[Any] = [None]
        if trainer.is_world_process_zero():
            recorded = [self.ledger(trainer).read(step, prompts, made_by)]
        shared: list[Group] | None = broadcast_object_list(recorded)[0]
        return shared

    def ledger(self, trainer: Any) -> RolloutLedger:
        """Return the ledger of the run, which the first process reads and writes."""
        if self._ledger is None:
            self._ledger = RolloutLedger(trainer.run.saver.address)
        return self._ledger


def logs_of(answers: Sequence[Rollout], started: float) -> dict[str, float]:
    """Return what LOGGED names, of the answers of a step whose drawing has `started`, by time.monotonic."""
    return {
        LOGGED["answer_tokens"]: sum(len(answer.tokens) for answer in answers) / len(answers),
        LOGGED["truncated"]: sum(answer.truncated for answer in answers) / len(answers),
        LOGGED["rollout_seconds"]: time.monotonic() - started,
    }


def write_sample(trainer: Any, out: Path) -> None:
    """Write some of the recorded answers into the folder of an artifact."""
    sample = RolloutLedger(trainer.run.saver.address).sample(trainer.state.global_step)
    (out / ROLLOUTS).write_text(sample, encoding="utf-8")
