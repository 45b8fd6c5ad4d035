"""Preferences: rows with a chosen and a rejected answer to one prompt, as two samples that are stored side by side.

The columns are TRL's: prompt, chosen and rejected, as text or as messages. Without a prompt, or with the prompt in both answers
too, the prompt is what chosen and rejected have in common, as in TRL's extract_prompt. A stored pair has the tokens and labels
of the chosen sequence and then of the rejected one, and both lengths (seq_lengths): the prompt is stored twice, so that nothing
is joined or cut when training reads it.
"""

import json
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from flytune.data.formats import Chat, Plain, column, optional_column, refuse_media, with_system
from flytune.data.labels import Encoded
from flytune.data.messages import Message, conversation_of, is_answer, messages_of, text_of, tools_of
from flytune.errors import DataError
from flytune.models.scoring import IGNORED

PREFERENCE = "preference"
"""Format of pairs in recipes and manifests."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, each as a complete sample of which only the answer is trained."""

    chosen: Chat | Plain
    rejected: Chat | Plain
    prompt: str
    """Identity of the prompt: pairs of equal prompts are always in the same split."""


def pair_of(row: dict[str, Any], columns: dict[str, str], where: str, system_prompt: str | None = None) -> Pair:
    """Return a row as a pair; `columns` maps our names to those in the data, `system_prompt` is for chats without one.

    Raises:
        DataError: a column is missing, its content does not fit, or both answers are equal.
    """
    refuse_media(row, columns, where)
    chosen, rejected = column(row, "chosen", columns, where), column(row, "rejected", columns, where)
    prompt = optional_column(row, "prompt", columns)
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are equal, so there is nothing to prefer; remove the row")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(
            f"{where}: chosen is {_kind(chosen)}, but rejected is {_kind(rejected)}; both must be text, or both messages"
        )
    if isinstance(chosen, str) and not isinstance(prompt, list):
        return _plain(chosen, rejected, prompt, columns, where)
    before, first, second = _messages(chosen, rejected, prompt, columns, where)
    context, tools, identity = context_of(before, row, columns, where, system_prompt)
    return Pair(Chat([*context, *first], tools), Chat([*context, *second], tools), identity)


def context_of(
    before: list[Message], row: dict[str, Any], columns: dict[str, str], where: str, system_prompt: str | None
) -> tuple[list[Message], list[dict[str, Any]] | None, str]:
    """Return the messages of a prompt with its system message and without trained answers, the row's tools, and the prompt's
    identity."""
    tools = tools_of(optional_column(row, "tools", columns), where)
    before = with_system(before, row, columns, where, system_prompt)
    identity = json.dumps([before, tools], sort_keys=True, default=str)
    return [message | {"train": False} if is_answer(message) else message for message in before], tools, identity


def _plain(chosen: str, rejected: Any, prompt: Any, columns: dict[str, str], where: str) -> Pair:
    first, second = (text_of(text, name, where) for text, name in ((chosen, "chosen"), (rejected, "rejected")))
    if prompt is None:
        # TRL's extract_prompt: a space before the first difference belongs to the answers.
        at = len(_common(first, second))
        at -= at > 0 and first[at - 1] == " "
        prompt, first, second = first[:at], first[at:], second[at:]
    prompt = text_of(prompt, columns.get("prompt", "prompt"), where)
    return Pair(Plain(prompt, first), Plain(prompt, second), prompt)


def _messages(
    chosen: Any, rejected: Any, prompt: Any, columns: dict[str, str], where: str
) -> tuple[list[Message], list[Message], list[Message]]:
    """Return the messages of the prompt, and those of both answers after it."""
    first, second = conversation(chosen, "chosen", where), conversation(rejected, "rejected", where)
    if prompt is None:
        count = len(_common(first, second))
    elif isinstance(prompt, str):
        text = text_of(prompt, columns.get("prompt", "prompt"), where)
        count = len(_common(first, second)) if any(message["role"] == "user" for message in first) else 0
        if not count:
            before: list[Message] = [{"role": "user", "content": text}]
            first, second, count = before + first, before + second, 1
        elif not any(message["content"] == text for message in first[:count]):
            raise DataError(
                f"{where}: the prompt is none of the messages that chosen and rejected begin with; remove the column prompt "
                "(data.columns), or the prompt from both answers"
            )
    else:
        before = conversation(prompt, "prompt", where)
        count = len(before)
        if first[:count] != before or second[:count] != before:
            first, second = before + first, before + second
    for name, messages in (("chosen", first), ("rejected", second)):
        rest = messages[count:]
        if not rest or rest[0]["role"] != "assistant":
            found = f"a message of {rest[0]['role']!r:.40}" if rest else "nothing"
            raise DataError(
                f"{where}: after the prompt, which chosen and rejected have in common, {name} has {found}; it must be an "
                "answer of the assistant: the prompts must be equal"
            )
    return first[:count], first[count:], second[count:]


def conversation(value: Any, name: str, where: str) -> list[Message]:
    """Return the messages of a column, whose text is an answer; also ShareGPT's turns."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": text_of(value, name, where)}]
    is_sharegpt = isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "from" in value[0]
    return (conversation_of if is_sharegpt else messages_of)(value, f"{where}: {name}")


def _common(first: Any, second: Any) -> list[Any]:
    """Return the longest common beginning of two sequences, as a list."""
    return [one for one, _ in takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False))]


def _kind(value: Any) -> str:
    return "text" if isinstance(value, str) else f"{type(value).__name__} {value!r:.40}"


def cut(chosen: Encoded, rejected: Encoded, max_length: int) -> tuple[Encoded, Encoded] | None:
    """Cut both sequences at max_length tokens; None if nothing is left to compare."""
    first, second = ((ids[:max_length], labels[:max_length]) for ids, labels in (chosen, rejected))
    is_trained = all(labels.count(IGNORED) < len(labels) for _, labels in (first, second))
    return (first, second) if is_trained and first[0] != second[0] else None
