"""Rows of other tools and of other kinds of files, in the forms that formats.py reads."""

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from flytune import json_core
from flytune.data.columns import COLUMNS, MASKS, PAIR, TURNS
from flytune.data.messages import MEDIA, SHAREGPT_ROLES
from flytune.errors import DataError

_CHATS = (*TURNS, "prompt", "completion", *PAIR)
_LISTS = ("history", "tools", *COLUMNS["tools"].unread, "input_ids", "labels", *MASKS)
_SPEAKERS = (("role", "content"), ("from", "value"))
_CHAT = re.compile(r"\s*\[\s*\{\s*(['\"])(?:role|content|from|value)\1\s*:")
_QUERY = ("query", "response")
_EMPTY = ("[]", "{}", "null")
_OPENAI = ("preferred_output", "non_preferred_output")


def known(row: dict[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return a row with lists in place of their JSON, turns in place of lists of their keys, and tools in
    place of functions.

    Raises:
        DataError: the text of a chat is Python's, not JSON.
    """
    row = _with_parts(row, columns)
    changed: dict[str, Any] = {}
    for name in _CHATS:
        theirs = columns.get(name, name)
        value = row.get(theirs)
        if isinstance(value, str) and (match := _CHAT.match(value)):
            changed[theirs] = _chat(value, match[1], theirs, where)
        elif isinstance(value, dict):
            changed[theirs] = _turns(value)
        elif _is_list_of_json(value):
            changed[theirs] = [_parsed(item) for item in value]
    for name in (*_LISTS, *MEDIA, "chat_template_kwargs"):
        theirs = columns.get(name, name)
        value = row.get(theirs)
        if isinstance(value, str) and value.strip() in _EMPTY:
            changed[theirs] = None
        elif isinstance(value, str) and value.lstrip()[:1] == "[" and name in _LISTS:
            changed[theirs] = _parsed(value)
        elif _is_list_of_json(value):
            changed[theirs] = [_parsed(item) for item in value]
    return _with_tools(_with_messages(row | changed if changed else row, columns), columns)


def _with_tools(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a chat with tools in place of functions."""
    theirs = columns.get("tools", "tools")
    is_chat = any(isinstance(row.get(columns.get(name, name)), list) for name in _CHATS)
    if not is_chat or not row.get("functions") or row.get(theirs) or "functions" in columns.values():
        return row
    others = dict(row)
    functions = others.pop("functions")
    if isinstance(functions, list):
        functions = [{"type": "function", "function": function} for function in functions]
    return others | {theirs: functions}


def _with_parts(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a row with the parts of objects that data.columns names by their path:
    `reward_model.ground_truth`."""
    with_texts = {}
    for theirs in columns.values():
        first, *keys = theirs.split(".")
        if theirs in row or not keys:
            continue
        value = row.get(first)
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            with_texts[theirs] = value
    return row | with_texts if with_texts else row


def _with_messages(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a row of ms-swift's forms (query, response and history; conversation of human and assistant)
    with messages."""
    named = {*columns.values()}
    if (
        set(_QUERY) <= row.keys()
        and not named & set(_QUERY)
        and not row.keys() & {"messages", "instruction", "output"}
    ):
        rest, pairs = dict(row), row.get("history") or []
        if not isinstance(pairs, list):
            return row
        rest.pop("history", None)
        pairs = [*pairs, [rest.pop(name) for name in _QUERY]]
    elif isinstance(row.get("conversation"), list) and "messages" not in row and "conversation" not in named:
        rest = {name: value for name, value in row.items() if name != "conversation"}
        pairs = [
            [turn.get("human"), turn.get("assistant")]
            for turn in row["conversation"]
            if isinstance(turn, dict)
        ]
    else:
        return row
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        return row
    roles = ("user", "assistant")
    turns = [
        {"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)
    ]
    return {**rest, "messages": turns}


def compared(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a pair of OpenAI's (input, preferred_output, non_preferred_output) or of ms-swift's (messages,
    and rejected_response or rejected_messages) with prompt, chosen and rejected; other rows as they are."""
    rest = dict(row)
    if isinstance(row.get("input"), dict) and all(name in row for name in _OPENAI):
        asked = rest.pop("input")
        chosen, rejected = (rest.pop(name) for name in _OPENAI)
        return {
            **rest,
            **asked,
            "prompt": rest.pop("messages", asked.get("messages")),
            "chosen": chosen,
            "rejected": rejected,
        }
    name = next((name for name in ("rejected_response", "rejected_messages") if row.get(name)), None)
    messages = row.get(columns.get("messages", "messages"))
    if name is None or "chosen" in row or not isinstance(messages, list) or not _is_answer(messages[-1:]):
        return row
    rejected = rest.pop(name)
    del rest[columns.get("messages", "messages")]
    if name == "rejected_response":
        before = list(messages)
        while _is_answer(before[-1:]):
            before.pop()
        rejected = [
            *before,
            *(rejected if isinstance(rejected, list) else [{"role": "assistant", "content": rejected}]),
        ]
    return {**rest, "chosen": messages, "rejected": rejected}


def _is_answer(last: list[Any]) -> bool:
    return (
        bool(last)
        and isinstance(last[0], dict)
        and SHAREGPT_ROLES.get(str(last[0].get("role"))) == "assistant"
    )


def _chat(value: str, quote: str, name: str, where: str) -> Any:
    """Return the turns of which a text is the JSON; the text itself if it is something else."""
    turns = _parsed(value)
    if isinstance(turns, list) and all(
        isinstance(turn, dict) and any(set(keys) <= turn.keys() for keys in _SPEAKERS) for turn in turns
    ):
        return turns
    if quote == "'":
        raise DataError(
            f"{where}: {name} is the text of a Python list ({value!r:.60}), which would be trained as it is; "
            "write it as JSON (json.dumps) or store the rows as JSON Lines or Parquet"
        )
    return value


def _is_list_of_json(value: Any) -> TypeGuard[list[str]]:
    """Return whether a value is a list of the JSON texts of objects, as Arrow needs where their keys
    differ."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, str) and item.lstrip()[:1] == "{" for item in value)
    )


def _turns(value: dict[str, Any]) -> Any:
    """Return the turns of an object with a list for each of their keys, as `datasets` has stored lists of
    objects."""
    is_columns = any(set(keys) <= value.keys() for keys in _SPEAKERS) and all(
        isinstance(item, list) for item in value.values()
    )
    if not is_columns or len({len(item) for item in value.values()}) != 1:
        return value
    return [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=True)]


def _parsed(text: str) -> Any:
    try:
        return json_core.load(text)
    except json_core.JSONError:
        return text
