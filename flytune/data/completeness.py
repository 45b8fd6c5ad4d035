"""Completeness of rendered chats: what a row says is in the text that the chat template renders, or the row
is refused.

Templates may trim text, write it as JSON, or leave out the thoughts (`<think>`) of earlier turns. They may
not leave out messages, or tools and calls, as templates do that know none.
"""

import html
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

from flytune import json_core
from flytune.data.formats import Chat
from flytune.data.messages import Message
from flytune.data.thoughts import answer_of
from flytune.errors import DataError

Render = Callable[[list[Message], list[dict[str, Any]] | None], str]
"""Function that renders messages and tools; it raises a DataError where the template refuses them."""
_FIRST_MARK = 0xF0000
_MOST_MARKS = 0xFFFE
"""Characters for private use from _FIRST_MARK on: the most messages that are marked."""
_MOST_PATTERNS = 256


class Completeness:
    """The check for one chat template."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._left_out: dict[tuple[tuple[str, bool], ...], int | None] = {}
        """The first message that is left out of chats of these roles, where it is known."""

    def check(self, chat: Chat, text: str, where: str) -> None:
        """Check that `text`, which was rendered of `chat`, has all that the row says.

        Raises:
            DataError: it lacks a message, a call, or a tool.
        """
        at = 0
        for index, message in enumerate(chat.messages):
            content = answer_of(message).strip()
            # Contents mostly follow one another: a search of all of the text for each would take the square
            # of the turns.
            found = text.find(content, at)
            if found >= 0:
                at = found + len(content)
            elif content not in text and not _is_in(content, text):
                raise _error(f"messages[{index}] ({message['role']})", where)
        pattern = tuple([(message["role"], not message["content"].strip()) for message in chat.messages])
        if pattern not in self._left_out and len(self._left_out) < _MOST_PATTERNS:
            self._left_out[pattern] = self._find_left_out(chat)
        if (left_out := self._left_out.get(pattern)) is not None:
            raise _error(f"messages[{left_out}] ({chat.messages[left_out]['role']})", where)
        if chat.tools or any(len(message) > 2 for message in chat.messages):
            self._check_calls(chat, text, where)

    def _find_left_out(self, chat: Chat) -> int | None:
        """Return the first message whose content the template leaves out, found by a character at the end of
        each."""
        if len(chat.messages) > _MOST_MARKS:
            return None
        marks = [chr(_FIRST_MARK + index) for index in range(len(chat.messages))]
        marked = [
            {**message, "content": message["content"] + mark} if message["content"].strip() else message
            for message, mark in zip(chat.messages, marks, strict=True)
        ]
        try:
            text = self._render(marked, chat.tools)
        except DataError:
            return None
        # A mark that is in no message may be one that the template cannot write at all.
        missing = {mark for at, mark in enumerate(marks) if marked[at] is not chat.messages[at]} - set(text)
        return next((at for at, mark in enumerate(marks) if mark in missing and not _shows(mark, text)), None)

    def _check_calls(self, chat: Chat, text: str, where: str) -> None:
        marks: dict[str, str] = {}
        codes = count(_FIRST_MARK)

        def mark(value: str, what: str) -> str:
            marks[found := chr(next(codes))] = f"{what} {value!r:.60}"
            return value + found

        messages = []
        for index, message in enumerate(chat.messages):
            calls = []
            for number, call in enumerate(message.get("tool_calls", ())):
                what = f"messages[{index}].tool_calls[{number}]:"
                function = call.get("function", call)
                name = mark(function["name"], f"{what} the name")
                arguments = _marked(function.get("arguments", {}), partial(mark, what=f"{what} the argument"))
                new = {**function, "name": name, "arguments": arguments}
                calls.append({**call, "function": new} if "function" in call else new)
            messages.append({**message, "tool_calls": calls} if calls else message)
        tools = []
        for index, tool in enumerate(chat.tools or ()):
            nested = isinstance(tool.get("function"), dict)
            function = tool["function"] if nested else tool
            if isinstance(function.get("name"), str):
                function = {**function, "name": mark(function["name"], f"tools[{index}]: the name")}
            tools.append({**tool, "function": function} if nested else function)
        if not marks:
            return
        try:
            rendered = self._render(messages, tools or None)
        except DataError:  # of templates that know some names; their texts are looked for as they are
            missing = [
                what for what in marks.values() if what.rpartition("the name ")[2].strip("'") not in text
            ]
        else:
            missing = [what for found, what in marks.items() if not _shows(found, rendered)]
        if missing:
            raise _error(missing[0], where)


def _error(what: str, where: str) -> DataError:
    return DataError(
        f"{where}: {what} is not in the text that the chat template renders, so it would not be trained on; "
        "give a template that writes it in data.chat_template, or remove it from the row"
    )


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    """Return arguments with each key and text marked."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        return {mark(key): _marked(item, mark) for key, item in value.items()}
    return [_marked(item, mark) for item in value] if isinstance(value, list) else value


def _shows(mark: str, text: str) -> bool:
    return mark in text or json.dumps(mark)[1:-1].lower() in text.lower()


def _is_in(content: str, text: str) -> bool:
    """Return whether a text has this content, apart from white space, case and the escapes of JSON."""
    squeezed = _squeezed(text)
    return any(_squeezed(form) in squeezed for form in _forms(content))


def _forms(content: str) -> Iterator[str]:
    yield content
    yield json.dumps(content, ensure_ascii=False)[1:-1]
    yield json.dumps(content)[1:-1]
    yield repr(content)[1:-1]
    yield html.escape(content)
    try:
        yield json.dumps(json_core.load(content), ensure_ascii=False)
    except ValueError:
        return


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()
