"""Data formats: rows to chats, prompts with completions, or tokens, by the names of their columns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flytune.data.columns import (
    ADVICE,
    COLUMNS,
    KNOWN,
    MASKS,
    OTHER_MASKS,
    PACKED,
    PAIR,
    PROMPTED_CHAT,
    REQUIRED,
    TURN_KEYS,
    UNREAD,
    NamedRow,
    likely_names,
    names_of,
    refuse_unread,
)
from flytune.data.messages import (
    SHAREGPT_ROLES,
    Message,
    conversation_of,
    is_answer,
    messages_of,
    text_of,
    tools_of,
)
from flytune.errors import DataError


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, which is rendered with the chat template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the assistant may call."""
    asked: int = field(default=0, compare=False)
    """Number of messages of the prompt, where answers to one prompt are compared or drawn; 0 of other
    chats."""

    @property
    def is_question(self) -> bool:
        """Return whether it is a prompt without an answer, which the model itself will draw."""
        return self.asked == len(self.messages)


@dataclass(frozen=True, slots=True)
class Plain:
    """Raw text without a chat template; plain text is a completion without a prompt."""

    prompt: str
    completion: str | None
    """None of a prompt whose answer the model itself will draw."""

    @property
    def text(self) -> str:
        return self.prompt + (self.completion or "")


@dataclass(frozen=True, slots=True)
class Tokens:
    """A sample that was tokenized elsewhere, not checked yet."""

    input_ids: Any
    labels: Any = None
    masks: dict[str, Any] = field(default_factory=dict)
    """Those of the columns MASKS that the row has."""


Sample = Chat | Plain | Tokens
CHATS = ("messages", "sharegpt", "instruction", PROMPTED_CHAT)
"""Formats that use the chat template. They may have a column `system`; messages and sharegpt also `tools`."""
RAW = ("text", "prompt_completion")
"""Formats of raw text, which gets BOS and EOS by data.add_bos_token and data.add_eos_token."""
_LABELS = ("true", "false", "0", "1", "0.0", "1.0")


def check_columns(columns: dict[str, str], key: str = "data") -> None:
    """Check that `columns` only renames columns that some format has; `key` is the section of the recipe that
    it is in.

    Raises:
        DataError: a name is unknown; the message lists the known ones.
    """
    if unknown := sorted(set(columns) - set(KNOWN)):
        ours = next((known.name for known in COLUMNS.values() if unknown[0] in known.aliases), None)
        meant = f"; {unknown[0]} is called {ours} here: {{{ours}: {columns[unknown[0]]}}}" if ours else ""
        raise DataError(
            f"{key}.columns: unknown name {', '.join(unknown)}{meant}; the known names are {', '.join(KNOWN)}"
        )


def choose(row: NamedRow, form: str) -> str:
    """Return `form`; for `auto` the first format whose columns the row has.

    Raises:
        DataError: no format fits; the message lists the row's columns, and those that each format needs.
    """
    if form != "auto":
        return _of_text_or_messages(form, row)
    for name in fitting(row):
        if row.is_pair and not _ends_with_answer(row, name):
            break
        label = label_column(row.values)
        if label and name not in ("text", "tokens"):
            raise DataError(
                f"{row.where}: the column {label} says which answers are undesirable, and objective: sft "
                f"would train them too; write objective: kto, or data.format: {name} to train all of them"
            )
        return _of_text_or_messages(name, row)
    if row.is_pair:
        answer = "output" if row.has("instruction") else "completion"
        raise DataError(
            f"{row.where}: the columns {' and '.join(PAIR)} are preferences, which objective: sft does not "
            f"train; write objective: dpo, or train the chosen answers alone (data.columns: {{{answer}: "
            f"{row.with_aliases().name('chosen')}}})"
        )
    if missing := [
        f"{name}: {theirs}"
        for name, theirs in row.columns.items()
        if "." not in theirs and theirs not in row.values
    ]:
        raise DataError(
            f"{row.where}: data.columns names columns that the row does not have: {', '.join(missing)}; its "
            f"columns are {row.listed}"
        )
    names = likely_names(row.values) or {"instruction": "question", "output": "answer"}
    shown = ", ".join(f"{ours}: {theirs}" for ours, theirs in names.items())
    needs = "; ".join(f"{name} needs {' and '.join(needed)}" for name, needed in REQUIRED.items())
    raise DataError(
        f"{row.where}: no format fits the columns {row.listed}: {needs}. "
        f"If the data has other names for them, map them in data.columns: {{{shown}}}"
        + "".join(f"; {name} {advice}" for name, advice in ADVICE.items() if row.values.get(name))
    )


def _of_text_or_messages(form: str, row: NamedRow) -> str:
    """Return a format, or PROMPTED_CHAT where prompt or completion are messages."""
    is_chat = any(isinstance(row.get(name), list) for name in REQUIRED["prompt_completion"])
    return PROMPTED_CHAT if form == "prompt_completion" and is_chat else form


def fitting(row: NamedRow) -> list[str]:
    """Return the formats whose columns a row has, in the order in which `auto` takes them."""
    return [name for name, needed in REQUIRED.items() if row.has(*needed)]


def label_column(row: dict[str, Any]) -> str | None:
    """Return the name of the column that says whether a row's answer is desirable; None without one."""
    return next((name for name in names_of("label") if str(row.get(name)).strip().lower() in _LABELS), None)


def prompt_of(row: NamedRow) -> Any:
    """Return the value of our column `prompt`; None if the row has none, or data.columns names it as the
    question of a chat."""
    is_question = row.columns.get("instruction") == row.name("prompt")
    return None if is_question else row.get("prompt")


def _ends_with_answer(row: NamedRow, form: str) -> bool:
    """Return whether the last turn of a row of chats is an answer; true of other formats."""
    turns = row.get(REQUIRED[form][0])
    if (
        form not in ("messages", "sharegpt")
        or not isinstance(turns, list)
        or not turns
        or not isinstance(turns[-1], dict)
    ):
        return True
    speakers = (turns[-1].get(row.name(key)) for key in ("role", "from"))
    return any(SHAREGPT_ROLES.get(str(speaker)) == "assistant" for speaker in speakers)


def convert(row: NamedRow, form: str, system_prompt: str | None = None) -> Sample:
    """Return a row as a sample. `form` is a key of REQUIRED; `system_prompt` is for chats without one.

    Raises:
        DataError: a column is missing, or its content does not fit the format.
    """
    refuse_unread(row, UNREAD[form])
    if form == "text":
        return Plain("", row.text("text"))
    if form == "prompt_completion":
        return Plain(row.text("prompt"), row.text("completion"))
    if form == "tokens":
        return _tokens(row)
    if form == PROMPTED_CHAT:
        messages = _prompted(row)
    elif form == "instruction":
        answer = row.text("output")
        messages = [*question_of(row), {"role": "assistant", "content": answer}]
    else:
        name = "messages" if form == "messages" else "conversations"
        messages = turns_of(row.require(name), name, row)
    tools = tools_of(row.get("tools"), row.where)
    return Chat(with_system(messages, row, system_prompt), tools)


def _prompted(row: NamedRow) -> list[Message]:
    """Return the messages of a prompt, whose answers are context, and of its completion."""
    if all(isinstance(row.get(name), str) for name in REQUIRED["prompt_completion"]):
        raise DataError(
            f"{row.where}: the row is text, and the first one is messages: text gets no chat template, so "
            "one model would see two formats; write all rows as messages, or name two files in data.sources"
        )
    sides: list[list[Message]] = []
    for name, role in zip(REQUIRED["prompt_completion"], ("user", "assistant"), strict=True):
        value = row.require(name)
        if isinstance(value, list):
            sides.append(messages_of(with_renamed_keys(value, row.columns), row.where))
        else:
            sides.append([{"role": role, "content": row.text(name)}])
    before, after = sides
    return [message | {"train": False} if is_answer(message) else message for message in before] + after


def with_system(messages: list[Message], row: NamedRow, system_prompt: str | None) -> list[Message]:
    """Return the messages with the row's system message, or `system_prompt`, if they have none of their
    own."""
    of_row = row.text("system") if row.get("system") is not None else None
    system = of_row or system_prompt
    if system and all(message["role"] != "system" for message in messages):
        return [{"role": "system", "content": system}, *messages]
    return messages


def _tokens(row: NamedRow) -> Tokens:
    masks = {name: mask for name in MASKS if (mask := row.get(name)) is not None}
    read = {*map(row.name, MASKS), *OTHER_MASKS}
    for name, value in row.values.items():
        is_mask = name.endswith(("mask", "masks")) and name not in read
        if value is not None and (is_mask or (name in PACKED and not _counts_up(value))):
            raise DataError(
                f"{row.where}: column {name} is not read, and would change what is trained on; "
                + (
                    "name it in data.columns: {completion_mask: ...}, or remove it; "
                    if is_mask
                    else "a row is one sample; "
                )
                + f"known are {', '.join(MASKS)}"
            )
    return Tokens(row.require("input_ids"), row.get("labels"), masks)


def _counts_up(value: Any) -> bool:
    return isinstance(value, list) and value == list(range(len(value)))


def turns_of(value: Any, name: str, row: NamedRow) -> list[Message]:
    """Return the messages of a value of a row in the form of our column `messages` or `conversations`.

    Raises:
        DataError: it is not a list of turns.
    """
    read = messages_of if name == "messages" else conversation_of
    return read(with_renamed_keys(value, row.columns), row.where)


def with_renamed_keys(turns: Any, columns: Mapping[str, str]) -> Any:
    """Return turns with the keys of ours that `columns` has other names for."""
    names = {columns[key]: key for key in TURN_KEYS if key in columns}
    if not names or not isinstance(turns, list):
        return turns
    return [
        {names.get(key, key): item for key, item in turn.items()} if isinstance(turn, dict) else turn
        for turn in turns
    ]


def question_of(row: NamedRow) -> list[Message]:
    """Return the question of the columns instruction and input, after the turns of the column history.

    Raises:
        DataError: a column is not text, or history is not a list of questions with answers.
    """
    question = row.text("instruction")
    is_whole = row.columns.get("instruction") == row.name("input")
    if not is_whole and row.get("input") is not None:
        # LLaMA-Factory's rows may have the whole question in either column.
        parts = [part for part in (question, row.text("input")) if part.strip()]
        question = row.separator.join(parts) or question
    return [*_history(row), {"role": "user", "content": question}]


def _history(row: NamedRow) -> list[Message]:
    """Return the earlier turns of LLaMA-Factory's column history: [[question, answer], ...]."""
    name, turns = row.name("history"), row.get("history") or []
    if not isinstance(turns, list) or not all(
        isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns
    ):
        raise DataError(f"{row.where}: {name} must be a list of [question, answer], found {turns!r:.60}")
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text_of(text, f"{name}[{index}]", row.where)}
        for index, turn in enumerate(turns)
        for role, text in zip(roles, turn, strict=True)
    ]
