"""Unpaired preferences: answers that are labelled desirable or undesirable, each a sample of its own.

The columns are TRL's: prompt and completion, as text or as messages, and label, which is true or false. A row with chosen and
rejected answers is two such rows, as TRL's unpair_preference_dataset makes them. The stored column `label` is 1 for a desirable
answer, and 0 for an undesirable one.
"""

from dataclasses import dataclass
from typing import Any

from flytune.data.formats import PAIR, Chat, Plain, column, refuse_media
from flytune.data.messages import Message, text_of
from flytune.data.pairs import context_of, conversation, pair_of
from flytune.errors import DataError

UNPAIRED = "unpaired"
"""Format of labelled answers in recipes and manifests."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """The answers of one row, each as a complete sample of which only the answer is trained."""

    samples: list[Chat | Plain]
    labels: list[bool]
    """True for each desirable answer."""
    prompt: str
    """Identity of the prompt: answers to equal prompts are always in the same split."""


def labelled_of(
    row: dict[str, Any], form: str, columns: dict[str, str], where: str, system_prompt: str | None = None
) -> Labelled:
    """Return a row's answers; `form` is the format in the recipe, `columns` maps our names to those in the data.

    Raises:
        DataError: a column is missing, its content does not fit, or the label is neither true nor false.
    """
    has_pair = all(columns.get(name, name) in row for name in PAIR) and columns.get("label", "label") not in row
    if form == "preference" or (form == "auto" and has_pair):
        pair = pair_of(row, columns, where, system_prompt)
        return Labelled([pair.chosen, pair.rejected], [True, False], pair.prompt)
    refuse_media(row, columns, where)
    prompt, answer, label = (column(row, name, columns, where) for name in ("prompt", "completion", "label"))
    if not isinstance(label, bool):
        raise DataError(
            f"{where}: {columns.get('label', 'label')} is {type(label).__name__} {label!r:.40}; it must be true for a "
            "desirable answer, or false"
        )
    if isinstance(prompt, str) and isinstance(answer, str):
        names = [columns.get(name, name) for name in ("prompt", "completion")]
        plain = Plain(text_of(prompt, names[0], where), text_of(answer, names[1], where))
        return Labelled([plain], [label], plain.prompt)
    before: list[Message] = (
        [{"role": "user", "content": text_of(prompt, columns.get("prompt", "prompt"), where)}]
        if isinstance(prompt, str)
        else conversation(prompt, "prompt", where)
    )
    messages = conversation(answer, "completion", where)
    if messages[: len(before)] == before:
        messages = messages[len(before) :]
    if not messages or messages[0]["role"] != "assistant":
        found = f"a message of {messages[0]['role']!r:.40}" if messages else "nothing"
        raise DataError(f"{where}: after the prompt, completion has {found}; it must be an answer of the assistant")
    context, tools, identity = context_of(before, row, columns, where, system_prompt)
    return Labelled([Chat([*context, *messages], tools)], [label], identity)
