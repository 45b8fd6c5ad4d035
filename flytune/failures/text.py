"""Texts of failures: the failure and advice first, the traceback last and shortened in its middle, without
secrets."""

import sys
from typing import NamedTuple

from flytune.addresses import redact

MOST = 12_000
"""Characters of a text's own sentences; longer ones are shortened too, so that a message can be sent at
all."""
LONGEST_LINE = 300
"""Most characters of the reason of an earlier attempt."""
_LEFT_OUT = "\n[... {0:,} characters left out ...]\n"


class FailureText(NamedTuple):
    """Text of a failure. `str` returns all of it."""

    sentence: str
    """The failure itself, in one line or several."""
    advice: str
    """Advice to the user."""
    task: str = ""
    """The name of the task that failed; empty where it is not known."""
    further: tuple[str, ...] = ()
    """Consequences, a line each: another attempt, the checkpoint to resume from, the log."""
    details: str = ""
    """A traceback, the stacks of a hang, or other text for a closer look."""

    @property
    def own(self) -> str:
        """The text without its details."""
        failed = f"{self.task} failed: " if self.task else ""
        return "\n".join([f"{failed}{self.sentence}\nwhat to do: {self.advice}", *self.further])

    def within(self, limit: int) -> str:
        """Return at most `limit` characters, or the text's own sentences where these are longer; without
        secrets."""
        sentences, details = shortened(redact(self.own), MOST), redact(self.details).strip("\n")
        # A few characters of a traceback help nobody.
        if not details or (left := limit - len(sentences) - 2) < 200:
            return sentences
        return f"{sentences}\n\n{shortened(details, left)}"

    def __str__(self) -> str:
        return self.within(10 * MOST)

    def is_in(self, message: str) -> bool:
        """Return whether a message of Flyte begins with this text, after words of Flyte's own."""
        return shortened(redact(self.own), MOST).partition("\n")[0][:LONGEST_LINE] in message


def task_name() -> str:
    """Return the name of the Flyte task that this process runs, as the pod's command has it; empty
    elsewhere."""
    given = dict(zip(sys.argv, sys.argv[1:], strict=False))
    # Flyte 1's command names it so, Flyte 2's the other way.
    return given.get("task-name", given.get("instance", ""))


def first_line(text: str) -> str:
    """Return the first line of a reason, cut at its end."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 4]} ..."


def shortened(text: str, limit: int) -> str:
    """Return a text without its middle, where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    left = limit - len(_LEFT_OUT) - 4
    head, tail = text[: left // 2], text[len(text) - (left - left // 2) :]
    return head + _LEFT_OUT.format(len(text) - len(head) - len(tail)) + tail
