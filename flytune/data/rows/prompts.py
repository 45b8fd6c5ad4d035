"""Prompts whose answers a model draws itself: a prompt, a reference answer, and the columns that rewards read.

`prompt` is text or messages, as in TRL. The reference answer is the column `completion`, or `answer` where there is none. It is
not trained: rewards are checked with it before training, and its loss shows what the training does to it. All other columns are
stored as JSON text in the column `fields`, and handed to the rewards.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flytune.data import unread_columns
from flytune.data.formats import (
    Chat,
    Plain,
    Sample,
    column,
    optional_column,
    prompt_of,
    turns_of,
    with_other_names,
)
from flytune.data.labels import Encoded
from flytune.data.messages import Message, text_of
from flytune.data.rows.base import Content, RowKind
from flytune.data.rows.pairs import context_of, conversation, other_prompt
from flytune.errors import DataError
from flytune.models.scoring import IGNORED
from flytune.recipe import Source
from flytune.row_names import PROMPTS

FORM = "prompts"
"""Format of such rows in manifests."""
LONGEST_FIELDS = 200_000
"""Characters of the columns that rewards read, of one row."""
REFERENCE = "reference"
"""Key of the reference answer in a stored row's fields."""
PROMPT = "prompt"
"""Key of the prompt, as text or messages."""


class Prompts(RowKind):
    """A stored row is a prompt with its reference answer, which has the labels; `fields` is what rewards read."""

    name = PROMPTS
    meaning = "prompts"
    title = "Prompt"
    columns: ClassVar[Mapping[str, str]] = {"fields": "text"}
    cuts = "truncate or drop"
    keeps_columns = True

    def form(self, row: dict[str, Any], source: Source, where: str) -> str:
        return FORM

    def content(self, row: dict[str, Any], form: str, source: Source, where: str, system_prompt: str | None) -> Content:
        columns = with_other_names(row, source.columns)
        unread_columns.refuse(row, columns, where, ("chat_template_kwargs",))
        prompt = prompt_of(row, columns)
        turns = other_prompt(row, columns, where, source.input_separator or "\n\n") if prompt is None else None
        if prompt is None and turns is None:
            prompt = column(row, "prompt", columns, where)  # says that it is missing
        reference = _reference(row, columns, where)
        fields = _fields(row, source.columns)
        if isinstance(prompt, str):
            text = text_of(prompt, columns.get("prompt", "prompt"), where)
            if not text.strip():
                raise DataError(f"{where}: prompt is empty; remove the row")
            return Content([Plain(text, reference)], text, fields=_json({PROMPT: text, REFERENCE: reference} | fields, where))
        before = turns if turns is not None else _turns(prompt, columns, where)
        if not before or before[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: prompt ends with {'nothing' if not before else 'an answer'}; it must end with a question"
            )
        context, tools, identity = context_of(before, row, columns, where, system_prompt)
        chat = Chat([*context, {"role": "assistant", "content": reference}], tools)
        bare = [{"role": message["role"], "content": message["content"]} for message in context]
        return Content([chat], identity, fields=_json({PROMPT: bare, REFERENCE: reference} | fields, where))

    def variant(self, samples: Sequence[Sample]) -> str:
        return "messages" if isinstance(samples[0], Chat) else "text"

    def values(self, lengths: list[int], label: bool | None, fields: str) -> tuple[Any, ...]:
        return (fields,)

    def has_template(self, formats: set[str], tokenizer: Any) -> bool:
        # Of messages or of text: the marks of a template are a superset of those of text.
        return bool(tokenizer.chat_template)

    def traced(self, length: int, packing: bool) -> dict[str, Any]:
        ids = [1] * length
        # A prompt has a token at least.
        return {"input_ids": ids, "labels": [IGNORED, *ids[1:]], "fields": "{}"}

    def is_trained(self, sequences: Sequence[Encoded]) -> bool:
        # Without a token before the answer there is nothing to answer to.
        return super().is_trained(sequences) and sequences[0][1][0] == IGNORED


def prompt_length(row: Mapping[str, Any]) -> int:
    """Return the number of tokens of a stored row's prompt: those before the reference answer."""
    return next(at for at, label in enumerate(row["labels"]) if label != IGNORED)


def _turns(value: Any, columns: dict[str, str], where: str) -> list[Message]:
    is_turns = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    if not is_turns:
        raise DataError(f"{where}: prompt is {type(value).__name__} {value!r:.40}; it must be text, or a list of messages")
    return conversation(value, "prompt", columns, where) if "from" in value[0] else turns_of(value, "messages", columns, where)


def _reference(row: dict[str, Any], columns: dict[str, str], where: str) -> str:
    """Return the reference answer of a row, as text."""
    for name in ("completion", "answer"):
        value = optional_column(row, name, columns)
        if value is None:
            continue
        if isinstance(value, bool | int | float):
            return str(value)
        if isinstance(value, list):  # TRL's form of messages
            value = "".join(message["content"] for message in conversation(value, name, columns, where))
        text = text_of(value, columns.get(name, name), where)
        if not text.strip():
            raise DataError(f"{where}: {columns.get(name, name)} is empty; rewards are checked with the reference answer")
        return text
    raise DataError(
        f"{where}: no reference answer: neither completion nor answer is among the columns {', '.join(row) or 'none'}; rewards "
        "are checked with it before a GPU is asked for. Add one, or map its name in data.columns: {completion: solution}"
    )


def _fields(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Return the columns that rewards read, by our names where data.columns maps them."""
    ours = {theirs: name for name, theirs in columns.items()}
    named = {ours.get(name, name): value for name, value in row.items()}
    return {name: value for name, value in named.items() if name not in (PROMPT, REFERENCE, *_TURNS)}


_TURNS = ("messages", "conversations", "system", "tools", "history")


def _json(fields: dict[str, Any], where: str) -> str:
    text = json.dumps(fields, sort_keys=True, default=str, ensure_ascii=False)
    if len(text) > LONGEST_FIELDS:
        raise DataError(
            f"{where}: {len(text):,} characters of columns that rewards read, and {LONGEST_FIELDS:,} are the most; remove "
            "columns that none reads"
        )
    return text
