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
CHATS = ("messages", "sharegpt", "instruction")
"""Formats that use the chat template. They may have a column `system`; messages and sharegpt also `tools`."""
RAW = ("text", "prompt_completion")
"""Formats of raw text, which gets BOS and EOS by data.add_bos_token and data.add_eos_token."""
MASKS = ("attention_mask", "completion_mask", "assistant_masks")
"""Columns of the format tokens with 1 or 0 for each token: transformers' for padding, TRL's two for trained tokens."""
_OTHER_MASKS = ("special_tokens_mask",)
_PACKED = ("position_ids", "seq_lengths", "cu_seqlens", "sequence_ids")
_NAMES = (*(name for names in REQUIRED.values() for name in names), "input", "system", "tools", "labels", *MASKS)


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
            return name
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
    for name in MEDIA:
        if name not in columns.values() and row.get(name) not in (None, "", [], {}):
            raise DataError(
                f"{where}: column {name} has content, and images, video and audio cannot be trained on; remove the column, "
                "or the rows that have some"
            )
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
        messages = read(_column(row, name, columns, where), where)
        tools = tools_of(_optional(row, "tools", columns), where)
    system = _optional(row, "system", columns)
    system = text_of(system, columns.get("system", "system"), where) if system is not None else None
    if (system := system or system_prompt) and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": system}, *messages]
    return Chat(messages, tools)


def _tokens(row: dict[str, Any], columns: dict[str, str], where: str) -> Tokens:
    masks = {name: mask for name in MASKS if (mask := _optional(row, name, columns)) is not None}
    read = {columns.get(name, name) for name in MASKS} | set(_OTHER_MASKS)
    for name, value in row.items():
        is_mask = name.endswith(("mask", "masks")) and name not in read
        if value is not None and (is_mask or (name in _PACKED and not _counts_up(value))):
            raise DataError(
                f"{where}: column {name} is not read, and would change what is trained on; "
                + ("name it in data.columns: {completion_mask: ...}, or remove it; " if is_mask else "a row is one sample; ")
                + f"known are {', '.join(MASKS)}"
            )
    return Tokens(_column(row, "input_ids", columns, where), _optional(row, "labels", columns), masks)


def _counts_up(value: Any) -> bool:
    return isinstance(value, list) and value == list(range(len(value)))


def _instruction(row: dict[str, Any], columns: dict[str, str], where: str) -> list[Message]:
    question = _string(row, "instruction", columns, where)
    if _optional(row, "input", columns) is not None:
        context = _string(row, "input", columns, where)
        question = f"{question}\n\n{context}" if context.strip() else question
    answer = _string(row, "output", columns, where)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _optional(row: dict[str, Any], name: str, columns: dict[str, str]) -> Any:
    return row.get(columns.get(name, name))


def _column(row: dict[str, Any], name: str, columns: dict[str, str], where: str) -> Any:
    column = columns.get(name, name)
    if column not in row:
        label = f"{column} (data.columns.{name})" if column != name else name
        raise DataError(f"{where}: column {label} is missing; the columns are {_column_names(row)}")
    return row[column]


def _string(row: dict[str, Any], name: str, columns: dict[str, str], where: str) -> str:
    return text_of(_column(row, name, columns, where), columns.get(name, name), where)


def _column_names(row: dict[str, Any]) -> str:
    return ", ".join(row) or "none"
