"""Rows to samples: a chat, or a prompt with its completion; columns found by name."""

from dataclasses import dataclass
from typing import Any

from flytune.errors import DataError

Message = dict[str, Any]
"""role and content, both strings; what else the row has is handed to the chat template."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Goes through the chat template."""

    messages: list[Message]


@dataclass(frozen=True, slots=True)
class Plain:
    """Raw text, no chat template; plain text is a completion without a prompt."""

    prompt: str
    completion: str


REQUIRED = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
"""Columns that each format needs, in the order in which `auto` tries them; instruction may also have `input`."""
_NAMES = (*(name for names in REQUIRED.values() for name in names), "input")


def choose(row: dict[str, Any], form: str, columns: dict[str, str], where: str) -> str:
    """`form`; for `auto` the first format whose columns the row has. `columns` is the recipe's {our name: their name}.

    Raises:
        DataError: `columns` renames what no format has; or no format fits: which columns there are, which each needs.
    """
    if unknown := sorted(set(columns) - set(_NAMES)):
        raise DataError(
            f"data.columns: unknown name {', '.join(unknown)}; known are {', '.join(_NAMES)}, each with the data's own name"
        )
    if form != "auto":
        return form
    for name, needed in REQUIRED.items():
        if all(columns.get(column, column) in row for column in needed):
            return name
    needs = "; ".join(f"{name} needs {' and '.join(needed)}" for name, needed in REQUIRED.items())
    raise DataError(
        f"{where}: no format fits the columns {_listed(row)}: {needs}. "
        "Where the data names them otherwise, say so in data.columns: {instruction: question, output: answer}"
    )


def convert(row: dict[str, Any], form: str, columns: dict[str, str], where: str) -> Chat | Plain:
    """One row as the sample it stands for. `form` is a key of REQUIRED.

    Raises:
        DataError: a column is missing, or holds something else than the format says.
    """
    if form == "messages":
        return Chat(_messages(_column(row, "messages", columns, where), where))
    if form == "text":
        return Plain("", _string(row, "text", columns, where))
    if form == "prompt_completion":
        return Plain(_string(row, "prompt", columns, where), _string(row, "completion", columns, where))
    question = _string(row, "instruction", columns, where)
    if row.get(columns.get("input", "input")) is not None:
        more = _string(row, "input", columns, where)
        question = f"{question}\n\n{more}" if more.strip() else question
    answer = _string(row, "output", columns, where)
    return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def _column(row: dict[str, Any], name: str, columns: dict[str, str], where: str) -> Any:
    theirs = columns.get(name, name)
    if theirs not in row:
        named = f"{theirs} (data.columns.{name})" if theirs != name else name
        raise DataError(f"{where}: column {named} is missing; there are {_listed(row)}")
    return row[theirs]


def _string(row: dict[str, Any], name: str, columns: dict[str, str], where: str) -> str:
    return _text(_column(row, name, columns, where), columns.get(name, name), where)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        hint = "; for lists of messages name the column in data.columns.messages" if isinstance(value, list) else ""
        raise DataError(f"{where}: {name} must be a string, found {type(value).__name__} {value!r:.60}{hint}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {name} holds half a surrogate pair ({value[error.start]!r}), which is no character"
        ) from None
    return value


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: messages must be a list of {{role, content}}, found {type(value).__name__} {value!r:.60}")
    messages = []
    for index, message in enumerate(value):
        name = f"messages[{index}]"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            found = f"an object with {_listed(message)}" if isinstance(message, dict) else f"{message!r:.60}"
            raise DataError(f"{where}: {name} must have role and content, found {found}")
        for part in ("role", "content"):
            _text(message[part], f"{name}.{part}", where)
        # As apply_chat_template does: templates take a key with null for one that is there.
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages


def _listed(row: dict[str, Any]) -> str:
    return ", ".join(row) or "none"
