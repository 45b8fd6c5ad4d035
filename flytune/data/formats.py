"""Data formats: rows to chats, prompts with completions, or tokens, by the names of their columns."""

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
SEPARATOR = "\n\n"
"""Text between instruction and input, where data.input_separator has no other."""


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


def choose(row: dict[str, Any], form: str, columns: dict[str, str], where: str) -> str:
    """Return `form`; for `auto` the first format whose columns the row has. `columns` maps our names to those
    in the data.

    Raises:
        DataError: no format fits; the message lists the row's columns, and those that each format needs.
    """
    if form != "auto":
        return _of_text_or_messages(form, row, columns)
    has_pair = is_pair(row, columns)
    for name in fitting(row, columns):
        if has_pair and not _ends_with_answer(row, name, columns):
            break
        label = label_column(row)
        if label and name not in ("text", "tokens"):
            raise DataError(
                f"{where}: the column {label} says which answers are undesirable, and objective: sft "
                f"would train them too; write objective: kto, or data.format: {name} to train all of them"
            )
        return _of_text_or_messages(name, row, columns)
    if has_pair:
        answer = "output" if columns.get("instruction", "instruction") in row else "completion"
        chosen = with_other_names(row, columns).get("chosen", "chosen")
        raise DataError(
            f"{where}: the columns {' and '.join(PAIR)} are preferences, which objective: sft does not "
            f"train; write objective: dpo, or train the chosen answers alone (data.columns: {{{answer}: "
            f"{chosen}}})"
        )
    if missing := [
        f"{name}: {theirs}" for name, theirs in columns.items() if "." not in theirs and theirs not in row
    ]:
        raise DataError(
            f"{where}: data.columns names columns that the row does not have: {', '.join(missing)}; its "
            f"columns are {_column_names(row)}"
        )
    names = likely_names(row) or {"instruction": "question", "output": "answer"}
    shown = ", ".join(f"{ours}: {theirs}" for ours, theirs in names.items())
    needs = "; ".join(f"{name} needs {' and '.join(needed)}" for name, needed in REQUIRED.items())
    raise DataError(
        f"{where}: no format fits the columns {_column_names(row)}: {needs}. "
        f"If the data has other names for them, map them in data.columns: {{{shown}}}"
        + "".join(f"; {name} {advice}" for name, advice in ADVICE.items() if row.get(name))
    )


def _of_text_or_messages(form: str, row: dict[str, Any], columns: dict[str, str]) -> str:
    """Return a format, or PROMPTED_CHAT where prompt or completion are messages."""
    values = [optional_column(row, name, columns) for name in REQUIRED["prompt_completion"]]
    return (
        PROMPTED_CHAT
        if form == "prompt_completion" and any(isinstance(value, list) for value in values)
        else form
    )


def fitting(row: dict[str, Any], columns: dict[str, str]) -> list[str]:
    """Return the formats whose columns a row has, in the order in which `auto` takes them."""
    return [
        name
        for name, needed in REQUIRED.items()
        if all(columns.get(column, column) in row for column in needed)
    ]


def label_column(row: dict[str, Any]) -> str | None:
    """Return the name of the column that says whether a row's answer is desirable; None without one."""
    return next((name for name in names_of("label") if str(row.get(name)).strip().lower() in _LABELS), None)


def is_pair(row: dict[str, Any], columns: dict[str, str]) -> bool:
    """Return whether a row has a chosen and a rejected answer."""
    names = with_other_names(row, columns)
    return all(names.get(column, column) in row for column in PAIR)


def with_other_names(row: dict[str, Any], columns: dict[str, str]) -> dict[str, str]:
    """Return `columns`, and the names that other tools have for columns of compared answers, where the row
    has those alone."""
    added = {}
    for ours in COLUMNS.values():
        if ours.name not in row and ours.name not in columns:
            read = [alias for alias in ours.aliases if alias in row and alias not in columns.values()]
            if read:
                added[ours.name] = read[0]
    return {**added, **columns} if added else columns


def prompt_of(row: dict[str, Any], columns: dict[str, str]) -> Any:
    """Return a row's value of our column `prompt`; None if it has none, or `columns` names it as the question
    of a chat."""
    is_question = columns.get("instruction") == columns.get("prompt", "prompt")
    return None if is_question else optional_column(row, "prompt", columns)


def _ends_with_answer(row: dict[str, Any], form: str, columns: dict[str, str]) -> bool:
    """Return whether the last turn of a row of chats is an answer; true of other formats."""
    turns = row[columns.get(REQUIRED[form][0], REQUIRED[form][0])]
    if (
        form not in ("messages", "sharegpt")
        or not isinstance(turns, list)
        or not turns
        or not isinstance(turns[-1], dict)
    ):
        return True
    speakers = (turns[-1].get(columns.get(key, key)) for key in ("role", "from"))
    return any(SHAREGPT_ROLES.get(str(speaker)) == "assistant" for speaker in speakers)


def convert(
    row: dict[str, Any],
    form: str,
    columns: dict[str, str],
    where: str,
    system_prompt: str | None = None,
    separator: str = SEPARATOR,
) -> Sample:
    """Return a row as a sample. `form` is a key of REQUIRED; `system_prompt` is for chats without one.

    `separator` is the text between instruction and input.

    Raises:
        DataError: a column is missing, or its content does not fit the format.
    """
    refuse_unread(row, columns, where, UNREAD[form])
    if form == "text":
        return Plain("", _string(row, "text", columns, where))
    if form == "prompt_completion":
        return Plain(_string(row, "prompt", columns, where), _string(row, "completion", columns, where))
    if form == "tokens":
        return _tokens(row, columns, where)
    if form == PROMPTED_CHAT:
        messages, tools = (
            _prompted(row, columns, where),
            tools_of(optional_column(row, "tools", columns), where),
        )
    elif form == "instruction":
        answer = _string(row, "output", columns, where)
        messages = [*question_of(row, columns, where, separator), {"role": "assistant", "content": answer}]
        tools = tools_of(optional_column(row, "tools", columns), where)
    else:
        name = "messages" if form == "messages" else "conversations"
        messages = turns_of(column(row, name, columns, where), name, columns, where)
        tools = tools_of(optional_column(row, "tools", columns), where)
    return Chat(with_system(messages, row, columns, where, system_prompt), tools)


def _prompted(row: dict[str, Any], columns: dict[str, str], where: str) -> list[Message]:
    """Return the messages of a prompt, whose answers are context, and of its completion."""
    if all(isinstance(optional_column(row, name, columns), str) for name in REQUIRED["prompt_completion"]):
        raise DataError(
            f"{where}: the row is text, and the first one is messages: text gets no chat template, so one "
            "model would see two formats; write all rows as messages, or name two files in data.sources"
        )
    sides: list[list[Message]] = []
    for name, role in zip(REQUIRED["prompt_completion"], ("user", "assistant"), strict=True):
        value = column(row, name, columns, where)
        is_text = not isinstance(value, list)
        text: list[Message] = (
            [{"role": role, "content": text_of(value, columns.get(name, name), where)}] if is_text else []
        )
        sides.append(text or messages_of(with_renamed_keys(value, columns), where))
    before, after = sides
    return [message | {"train": False} if is_answer(message) else message for message in before] + after


def with_system(
    messages: list[Message],
    row: dict[str, Any],
    columns: dict[str, str],
    where: str,
    system_prompt: str | None,
) -> list[Message]:
    """Return the messages with the row's system message, or `system_prompt`, if they have none of their
    own."""
    system = optional_column(row, "system", columns)
    system = text_of(system, columns.get("system", "system"), where) if system is not None else None
    if (system := system or system_prompt) and all(message["role"] != "system" for message in messages):
        return [{"role": "system", "content": system}, *messages]
    return messages


def _tokens(row: dict[str, Any], columns: dict[str, str], where: str) -> Tokens:
    masks = {name: mask for name in MASKS if (mask := optional_column(row, name, columns)) is not None}
    read = {columns.get(name, name) for name in MASKS} | set(OTHER_MASKS)
    for name, value in row.items():
        is_mask = name.endswith(("mask", "masks")) and name not in read
        if value is not None and (is_mask or (name in PACKED and not _counts_up(value))):
            raise DataError(
                f"{where}: column {name} is not read, and would change what is trained on; "
                + (
                    "name it in data.columns: {completion_mask: ...}, or remove it; "
                    if is_mask
                    else "a row is one sample; "
                )
                + f"known are {', '.join(MASKS)}"
            )
    return Tokens(column(row, "input_ids", columns, where), optional_column(row, "labels", columns), masks)


def _counts_up(value: Any) -> bool:
    return isinstance(value, list) and value == list(range(len(value)))


def turns_of(value: Any, name: str, columns: dict[str, str], where: str) -> list[Message]:
    """Return the messages of our column `messages` or `conversations`, whose keys `columns` may rename.

    Raises:
        DataError: it is not a list of turns.
    """
    return (messages_of if name == "messages" else conversation_of)(with_renamed_keys(value, columns), where)


def with_renamed_keys(turns: Any, columns: dict[str, str]) -> Any:
    """Return turns with the keys of ours that `columns` has other names for."""
    names = {columns[key]: key for key in TURN_KEYS if key in columns}
    if not names or not isinstance(turns, list):
        return turns
    return [
        {names.get(key, key): item for key, item in turn.items()} if isinstance(turn, dict) else turn
        for turn in turns
    ]


def question_of(
    row: dict[str, Any], columns: dict[str, str], where: str, separator: str = SEPARATOR
) -> list[Message]:
    """Return the question of the columns instruction and input, after the turns of the column history.

    Raises:
        DataError: a column is not text, or history is not a list of questions with answers.
    """
    question = _string(row, "instruction", columns, where)
    is_whole = columns.get("instruction") == columns.get("input", "input")
    if not is_whole and optional_column(row, "input", columns) is not None:
        context = _string(row, "input", columns, where)
        # LLaMA-Factory's rows may have the whole question in either column.
        question = separator.join(part for part in (question, context) if part.strip()) or question
    return [*_history(row, columns, where), {"role": "user", "content": question}]


def _history(row: dict[str, Any], columns: dict[str, str], where: str) -> list[Message]:
    """Return the earlier turns of LLaMA-Factory's column history: [[question, answer], ...]."""
    name, turns = columns.get("history", "history"), optional_column(row, "history", columns) or []
    if not isinstance(turns, list) or not all(
        isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns
    ):
        raise DataError(f"{where}: {name} must be a list of [question, answer], found {turns!r:.60}")
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text_of(text, f"{name}[{index}]", where)}
        for index, turn in enumerate(turns)
        for role, text in zip(roles, turn, strict=True)
    ]


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
