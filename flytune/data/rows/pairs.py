"""Preferences: rows with a chosen and a rejected answer to one prompt, as two samples that are stored side by
side.

The columns are TRL's: prompt, chosen and rejected, as text or as messages; or, in place of prompt, those of
other tools: turns (messages, conversations) or a question (instruction). Without a prompt, or with the prompt
in both answers too, the prompt is what chosen and rejected have in common, as in TRL's extract_prompt. A
stored pair has the tokens and labels of the chosen sequence and then of the rejected one, and both lengths
(seq_lengths): the prompt is stored twice, so that nothing is joined or cut when training reads it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

from flytune.data.check import Check, judged
from flytune.data.columns import CHAT_CONTEXT, TURNS, NamedRow, refuse_unread
from flytune.data.formats import (
    Chat,
    Plain,
    Sample,
    prompt_of,
    question_of,
    turns_of,
    with_renamed_keys,
    with_system,
)
from flytune.data.labels import Encoded
from flytune.data.messages import Message, conversation_of, is_answer, messages_of, text_of, tools_of
from flytune.data.rows.base import ComparedRows, Content
from flytune.errors import DataError
from flytune.models.scoring import IGNORED
from flytune.records import Manifest
from flytune.row_names import PAIRS
from flytune.sentences import counted_of

PREFERENCE = "preference"
"""Format of pairs in recipes and manifests."""


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt, each as a complete sample of which only the answer is trained."""

    chosen: Chat | Plain
    rejected: Chat | Plain
    prompt: str
    """Identity of the prompt: pairs of equal prompts are always in the same split."""


def pair_of(row: NamedRow, system_prompt: str | None = None) -> PreferencePair:
    """Return a row as a pair; `system_prompt` is for chats without one.

    Raises:
        DataError: a column is missing, its content does not fit, or both answers are equal.
    """
    refuse_unread(row, unread_of_compared(row))
    row = row.with_aliases()
    chosen, rejected = row.require("chosen"), row.require("rejected")
    prompt = prompt_of(row)
    if prompt is None and _is_answer_alone(chosen):
        prompt = other_prompt(row)
    if chosen == rejected:
        raise DataError(
            f"{row.where}: chosen and rejected are equal, so there is nothing to prefer; remove the row"
        )
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(
            f"{row.where}: chosen is {_kind(chosen)}, but rejected is {_kind(rejected)}; both must be text, "
            "or both messages"
        )
    if isinstance(chosen, str) and not isinstance(prompt, list):
        return _plain(chosen, rejected, prompt, row)
    before, first, second = _messages(chosen, rejected, prompt, row)
    context, tools, identity = context_of(before, row, system_prompt)
    chosen, rejected = (Chat([*context, *answer], tools, len(context)) for answer in (first, second))
    return PreferencePair(chosen, rejected, identity)


def unread_of_compared(row: NamedRow) -> list[str]:
    """Return the columns that other tools read and a row of answers to compare does not."""
    row = row.with_aliases()
    prompt = prompt_of(row)
    has_question = prompt is None and row.has("instruction")
    answer = row.get("chosen") or row.get("completion")
    is_text = isinstance(answer, str) and not has_question and (prompt is None or isinstance(prompt, str))
    is_text = is_text and not any(row.get(name) for name in TURNS)
    return [
        "chat_template_kwargs",
        *([] if has_question else ["history"]),
        *(CHAT_CONTEXT if is_text else ()),
    ]


def other_prompt(row: NamedRow) -> list[Message] | None:
    """Return the prompt of a row without the column prompt: its turns, or its question; None if it has
    neither."""
    for name in reversed(TURNS):
        if turns := row.get(name):
            return turns_of(turns, name, row)
    # A column that the recipe names and the row lacks is an error of question_of, not a row without a
    # question.
    has_question = "instruction" in row.columns or row.get("instruction") is not None
    return question_of(row) if has_question else None


def _is_answer_alone(chosen: Any) -> bool:
    """Return whether an answer has no turns before it: its text, one turn, or turns of the assistant and of
    tools."""
    turns = chosen if isinstance(chosen, list) else []
    return not any(
        isinstance(turn, dict) and {turn.get("role"), turn.get("from")} & {"user", "human"} for turn in turns
    )


def context_of(
    before: list[Message], row: NamedRow, system_prompt: str | None
) -> tuple[list[Message], list[dict[str, Any]] | None, str]:
    """Return the messages of a prompt with its system message and without trained answers, the row's tools,
    and the prompt's identity."""
    tools = tools_of(row.get("tools"), row.where)
    before = with_system(before, row, system_prompt)
    identity = json.dumps([before, tools], sort_keys=True, default=str)
    return (
        [message | {"train": False} if is_answer(message) else message for message in before],
        tools,
        identity,
    )


def _plain(chosen: str, rejected: Any, prompt: Any, row: NamedRow) -> PreferencePair:
    first, second = (
        text_of(text, name, row.where) for text, name in ((chosen, "chosen"), (rejected, "rejected"))
    )
    if prompt is None:
        # TRL's extract_prompt: a space before the first difference belongs to the answers.
        at = len(_common(first, second))
        at -= at > 0 and first[at - 1] == " "
        prompt, first, second = first[:at], first[at:], second[at:]
    prompt = text_of(prompt, row.name("prompt"), row.where)
    return PreferencePair(Plain(prompt, first), Plain(prompt, second), prompt)


def _messages(
    chosen: Any, rejected: Any, prompt: Any, row: NamedRow
) -> tuple[list[Message], list[Message], list[Message]]:
    """Return the messages of the prompt, and those of both answers after it."""
    first, second = conversation(chosen, "chosen", row), conversation(rejected, "rejected", row)
    if prompt is None:
        count = len(_common(first, second))
    elif isinstance(prompt, str):
        text = text_of(prompt, row.name("prompt"), row.where)
        count = len(_common(first, second)) if any(message["role"] == "user" for message in first) else 0
        if not count:
            before: list[Message] = [{"role": "user", "content": text}]
            first, second, count = before + first, before + second, 1
        elif not any(message["content"] == text for message in first[:count]):
            raise DataError(
                f"{row.where}: the prompt is none of the messages that chosen and rejected begin with; "
                "remove the column prompt (data.columns), or the prompt from both answers"
            )
    else:
        before = conversation(prompt, "prompt", row)
        count = len(before)
        if first[:count] != before or second[:count] != before:
            first, second = before + first, before + second
    for name, messages in (("chosen", first), ("rejected", second)):
        require_answer(
            messages[count:],
            f"{row.where}: after the prompt, which chosen and rejected have in common, {name}",
            ": the prompts must be equal",
        )
    return first[:count], first[count:], second[count:]


def require_answer(messages: list[Message], what: str, advice: str = "") -> None:
    """Require that messages after a prompt begin with an answer; `what` has them.

    Raises:
        DataError: there are none, or the first one is not of the assistant.
    """
    if not messages or messages[0]["role"] != "assistant":
        instead = f"a message of {messages[0]['role']!r:.40}" if messages else "nothing"
        raise DataError(f"{what} has {instead}; it must be an answer of the assistant{advice}")


def conversation(value: Any, name: str, row: NamedRow) -> list[Message]:
    """Return the messages of a column, whose text is an answer; also ShareGPT's turns, and one turn alone."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": text_of(value, name, row.where)}]
    value = with_renamed_keys([value] if isinstance(value, dict) else value, row.columns)
    is_sharegpt = (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "from" in value[0]
    )
    return (conversation_of if is_sharegpt else messages_of)(value, f"{row.where}: {name}")


def _common(first: Any, second: Any) -> list[Any]:
    """Return the longest common beginning of two sequences, as a list."""
    return [
        message for message, _ in takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False))
    ]


def _kind(value: Any) -> str:
    return "text" if isinstance(value, str) else f"{type(value).__name__} {value!r:.40}"


class Pairs(ComparedRows):
    """A stored row has both sequences; `seq_lengths` are their lengths."""

    name = PAIRS
    meaning = "pairs of a chosen and a rejected answer"
    title = "Pair"
    sequence_names = ("chosen", "rejected")
    columns: ClassVar[Mapping[str, str]] = {"seq_lengths": "list"}
    contradiction = "equal one in the other order (a > b and b > a)"

    def form(self, row: NamedRow) -> str:
        return PREFERENCE

    def content(self, row: NamedRow, form: str, system_prompt: str | None) -> Content:
        pair = pair_of(row, system_prompt)
        return Content([pair.chosen, pair.rejected], pair.prompt)

    def is_trained(self, sequences: Sequence[Encoded]) -> bool:
        (chosen, _), (rejected, _) = sequences
        return super().is_trained(sequences) and chosen != rejected

    def aligned(self, sequences: list[Encoded], samples: Sequence[Sample]) -> list[Encoded]:
        # A template may write something before one of the answers alone: the thoughts of one, say, but not
        # the other's tags.
        starts = [
            next((at for at, label in enumerate(labels) if label != IGNORED), len(labels))
            for _, labels in sequences
        ]
        first = min(starts)
        (chosen, _), (rejected, _) = sequences
        if not isinstance(samples[0], Chat) or max(starts) == first or chosen[:first] != rejected[:first]:
            return sequences
        return [
            (ids, [*labels[:first], *ids[first:start], *labels[start:]])
            for (ids, labels), start in zip(sequences, starts, strict=True)
        ]

    def sides(self, part: Any) -> tuple[Any, Any] | None:
        chosen, rejected = part.hashes[::2], part.hashes[1::2]
        return chosen + rejected, chosen < rejected

    def checks(self, manifest: Manifest) -> Iterator[Check]:
        yield scores_of_pairs(manifest)


def scores_of_pairs(manifest: Manifest) -> Check:
    """Check that the rows' own scores and margins agree with their order."""
    contradicted = counted_of(manifest.contradicted, manifest.rows, "pair", "has", "have")
    return judged(
        "scores of pairs",
        manifest.contradicted,
        manifest.rows,
        f"{contradicted} a score or margin for the rejected answer",
        "only warns",
        fine="no score or margin says that the rejected answer is better",
        advice="chosen is trained as the better one in any case: exchange both answers, or remove the pair",
    )
