"""Data formats: rows to chats, prompts with completions, or tokens, by the names of their columns."""

from dataclasses import dataclass, field
from typing import Any

from flytune.data.messages import MEDIA, Message, conversation_of, messages_of, text_of, tools_of
from flytune.errors import DataError


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, which is rendered with the chat template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the assistant may call."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Raw text without a chat template; plain text is a completion without a prompt."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """A sample that was tokenized elsewhere, not checked yet."""

    input_ids: Any
    labels: Any = None
    masks: dict[str, Any] = field(default_factory=dict)
    """Those of the columns MASKS that the row has."""


Sample = Chat | Plain | Tokens
REQUIRED = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
    "tokens": ("input_ids",),
}
"""Columns that each format requires, in the order in which `auto` tries the formats."""
PAIR = ("chosen", "rejected")
"""Columns of preferences, beside `prompt` (pairs.py)."""
CHATS = ("messages", "sharegpt", "instruction")
"""Formats that use the chat template. They may have a column `system`; messages and sharegpt also `tools`."""
RAW = ("text", "prompt_completion")
"""Formats of raw text, which gets BOS and EOS by data.add_bos_token and data.add_eos_token."""
MASKS = ("attention_mask", "completion_mask", "assistant_masks")
"""Columns of the format tokens with 1 or 0 for each token: transformers' for padding, TRL's two for trained tokens."""
_OTHER_MASKS = ("special_tokens_mask",)
_PACKED = ("position_ids", "seq_lengths", "cu_seqlens", "sequence_ids")
_NAMES = (*(name for names in REQUIRED.values() for name in names), "input", "system", "tools", "labels", *MASKS,
          "chosen", "rejected", "label")  # fmt: skip


def check_columns(columns: dict[str, str], key: str = "data") -> None:
    """Check that `columns` only renames columns that some format has; `key` is the section of the recipe that it is in.

    Raises:
        DataError: a name is unknown; the message lists the known ones.
    """
    if unknown := sorted(set(columns) - set(_NAMES)):
        raise DataError(f"{key}.columns: unknown name {', '.join(unknown)}; the known names are {', '.join(_NAMES)}")


def choose(row: dict[str, Any], form: str, columns: dict[str, str], where: str) -> str:
    """Return `form`; for `auto` the first format whose columns the row has. `columns` maps our names to those in the data.

    Raises:
        DataError: no format fits; the message lists the row's columns, and those that each format needs.
    """
    if form != "auto":
        return form
    for name, needed in REQUIRED.items():
        if all(columns.get(column, column) in row for column in needed):
            if name == "prompt_completion" and isinstance(row.get("label"), bool):
                raise DataError(
                    f"{where}: the column label says which answers are undesirable, and objective: sft would train them too; "
                    "write objective: kto, or data.format: prompt_completion to train all of them"
                )
            return name
    if all(columns.get(column, column) in row for column in PAIR):
        raise DataError(
            f"{where}: the columns {' and '.join(PAIR)} are preferences, which objective: sft does not train; write objective: "
            "dpo, or train the chosen answers alone (data.columns: {completion: chosen})"
        )
    needs = "; ".join(f"{name} needs {' and '.join(needed)}" for name, needed in REQUIRED.items())
    raise DataError(
        f"{where}: no format fits the columns {_column_names(row)}: {needs}. "
        "If the data has other names for them, map them in data.columns: {instruction: question, output: answer}"
    )


def convert(row: dict[str, Any], form: str, columns: dict[str, str], where: str, system_prompt: str | None = None) -> Sample:
    """Return a row as a sample. `form` is a key of REQUIRED; `system_prompt` is for chats without one.

    Raises:
        DataError: a column is missing, or its content does not fit the format.
    """
    refuse_media(row, columns, where)
    if form == "text":
        return Plain("", _string(row, "text", columns, where))
    if form == "prompt_completion":
        return Plain(_string(row, "prompt", columns, where), _string(row, "completion", columns, where))
    if form == "tokens":
        return _tokens(row, columns, where)
    if form == "instruction":
        messages, tools = _instruction(row, columns, where), None
    else:
        read, name = (messages_of, "messages") if form == "messages" else (conversation_of, "conversations")
        messages = read(column(row, name, columns, where), where)
        tools = tools_of(optional_column(row, "tools", columns), where)
    return Chat(with_system(messages, row, columns, where, system_prompt), tools)


def refuse_media(row: dict[str, Any], columns: dict[str, str], where: str) -> None:
    """Refuse rows with images, video or audio.

    Raises:
        DataError: one of their columns has content.
    """
    for name in MEDIA:
        if name not in columns.values() and row.get(name) not in (None, "", [], {}):
            raise DataError(
                f"{where}: column {name} has content, and images, video and audio cannot be trained on; remove the column, "
                "or the rows that have some"
            )


def with_system(
    messages: list[Message], row: dict[str, Any], columns: dict[str, str], where: str, system_prompt: str | None
) -> list[Message]:
    """Return the messages with the row's system message, or `system_prompt`, if they have none of their own."""
    system = optional_column(row, "system", columns)
    system = text_of(system, columns.get("system", "system"), where) if system is not None else None
    if (system := system or system_prompt) and all(message["role"] != "system" for message in messages):
        return [{"role": "system", "content": system}, *messages]
    return messages


def _tokens(row: dict[str, Any], columns: dict[str, str], where: str) -> Tokens:
    masks = {name: mask for name in MASKS if (mask := optional_column(row, name, columns)) is not None}
    read = {columns.get(name, name) for name in MASKS} | set(_OTHER_MASKS)
    for name, value in row.items():
        is_mask = name.endswith(("mask", "masks")) and name not in read
        if value is not None and (is_mask or (name in _PACKED and not _counts_up(value))):
            raise DataError(
                f"{where}: column {name} is not read, and would change what is trained on; "
                + ("name it in data.columns: {completion_mask: ...}, or remove it; " if is_mask else "a row is one sample; ")
                + f"known are {', '.join(MASKS)}"
            )
    return Tokens(column(row, "input_ids", columns, where), optional_column(row, "labels", columns), masks)


def _counts_up(value: Any) -> bool:
    return isinstance(value, list) and value == list(range(len(value)))


def _instruction(row: dict[str, Any], columns: dict[str, str], where: str) -> list[Message]:
    question = _string(row, "instruction", columns, where)
    if optional_column(row, "input", columns) is not None:
        context = _string(row, "input", columns, where)
        question = f"{question}\n\n{context}" if context.strip() else question
    answer = _string(row, "output", columns, where)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def optional_column(row: dict[str, Any], name: str, columns: dict[str, str]) -> Any:
    """Return a row's value of our column `name`, which `columns` may rename; None if it has none."""
    return row.get(columns.get(name, name))


def column(row: dict[str, Any], name: str, columns: dict[str, str], where: str) -> Any:
    """Return a row's value of our column `name`, which `columns` may rename.

    Raises:
        DataError: the row has no such column.
    """
    theirs = columns.get(name, name)
    if theirs not in row:
        label = f"{theirs} (data.columns.{name})" if theirs != name else name
        raise DataError(f"{where}: column {label} is missing; the columns are {_column_names(row)}")
    return row[theirs]


def _string(row: dict[str, Any], name: str, columns: dict[str, str], where: str) -> str:
    return text_of(column(row, name, columns, where), columns.get(name, name), where)


def _column_names(row: dict[str, Any]) -> str:
    return ", ".join(row) or "none"
