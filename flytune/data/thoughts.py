"""Thoughts of answers: one thing, whether a message has them in a key of its own or in its content, as
`<think>why</think>`.

A template may know either form, both, or none. Messages are rendered in a form that it writes: in a key of
its own where it knows one, so that both forms give one text.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from flytune.data.messages import THOUGHT_KEYS, Message, thoughts_in
from flytune.errors import DataError

_CONTENT = "content"
_MARK = "\uf8ff"
"""A private-use character."""
Render = Callable[[list[Message]], str]


class Parts(NamedTuple):
    """An answer of the assistant with its thoughts."""

    thoughts: str
    """Empty where the content has the tags alone, as in data of models that may also not think."""
    answer: str
    form: str
    """Key of the message that has the thoughts: one of THOUGHT_KEYS, or content."""
    start: int
    """Position of the thoughts in the value of that key."""


class ThoughtCounts(NamedTuple):
    """Numbers of thoughts of a row's answers, by what became of them."""

    trained: int = 0
    context: int = 0
    left_out: int = 0
    """Those of earlier answers that the template does not write; with data.train_on: answers, of last ones
    too."""


NO_THOUGHTS = ThoughtCounts()


def parts_of(message: Message) -> Parts | None:
    """Return the parts of a message of the assistant that has thoughts; None of others."""
    if message["role"] != "assistant":
        return None
    content = message["content"]
    if len(message) > 2 and (key := next((key for key in THOUGHT_KEYS if message.get(key)), None)):
        return Parts(message[key], content, key, 0)
    if "</think>" not in content or (found := thoughts_in(content)) is None:
        return None
    start, end, answer = found
    return Parts(content[start:end], content[answer:], _CONTENT, start)


def answer_of(message: Message) -> str:
    """Return the content of a message without its thoughts."""
    parts = parts_of(message)
    return parts.answer if parts else str(message["content"])


def with_mark(message: Message, parts: Parts, mark: str) -> Message:
    """Return the message with `mark` before its thoughts, behind the white space that a template may
    remove."""
    value = message[parts.form]
    return {**message, parts.form: value[: parts.start] + behind_white_space(value[parts.start :], mark)}


def behind_white_space(text: str, mark: str) -> str:
    """Return the text with `mark` behind the white space that it begins with."""
    at = len(text) - len(text.lstrip())
    return text[:at] + mark + text[at:]


def with_answer(message: Message, parts: Parts, answer: str) -> Message:
    """Return the message with another answer after the same thoughts."""
    content = message["content"]
    return {**message, "content": content[: len(content) - len(parts.answer)] + answer}


def in_form(message: Message, parts: Parts, form: str) -> Message:
    """Return the message with its thoughts in another form."""
    rest = {key: item for key, item in message.items() if key not in THOUGHT_KEYS}
    thoughts = parts.thoughts.strip()
    if form == _CONTENT:
        return {**rest, "content": f"<think>\n{thoughts}\n</think>\n\n{parts.answer}"}
    return {**rest, "content": parts.answer, form: thoughts}


class ThoughtForms:
    """The form of thoughts that a template writes, found with a chat of one answer."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._found: str | None = None

    def written(self, messages: list[Message]) -> list[Message]:
        """Return the messages with thoughts in a form that the template writes; as they are if it writes
        none."""
        changed: dict[int, Message] = {}
        for index, message in enumerate(messages):
            parts = parts_of(message)
            if parts and parts.thoughts.strip() and (form := self._form()) != parts.form and form:
                changed[index] = in_form(message, parts, form)
        return (
            [changed.get(index, message) for index, message in enumerate(messages)] if changed else messages
        )

    def _form(self) -> str:
        """Return the first form that the template writes; empty if it writes none."""
        if self._found is None:
            self._found = next((form for form in (*THOUGHT_KEYS, _CONTENT) if self._writes(form)), "")
        return self._found

    def _writes(self, form: str) -> bool:
        answer: dict[str, Any] = {"role": "assistant", "content": f"b{_MARK}"}
        try:
            text = self._render(
                [
                    {"role": "user", "content": "a"},
                    in_form(answer, Parts(_MARK, answer["content"], form, 0), form),
                ]
            )
        except DataError:
            return False
        return text.count(_MARK) > 1
