"""Thoughts of answers: one thing, whether a message has them in a key of its own or in its content, as
`<think>why</think>`.

A template may know either form, both, or none. Messages are rendered in a form that it writes: in a key of
its own where it knows one, so that both forms give one text.

Trained are the characters of an answer from the end of the generation prompt on, with their thoughts, or
from the answer on (ThoughtSpans).
"""

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from flytune.data.chat_template import Span, Tools
from flytune.data.formats import Chat
from flytune.data.messages import THOUGHT_KEYS, Message, thoughts_in
from flytune.errors import DataError

_CONTENT = "content"
_MARK = "\uf8ff"
"""A private-use character."""
_QUESTION: list[Message] = [{"role": "user", "content": "a"}]
Render = Callable[[list[Message], Tools], str]
"""Function that renders messages and tools; it raises a DataError where the template refuses them."""


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
    if "</think>" not in content or (places := thoughts_in(content)) is None:
        return None
    start, end, answer = places
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
            form = self._form() if parts and parts.thoughts.strip() else ""
            if parts and form and form != parts.form:
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
            thought = in_form(answer, Parts(_MARK, answer["content"], form, 0), form)
            text = self._render([*_QUESTION, thought], None)
        except DataError:
            return False
        return text.count(_MARK) > 1


class ThoughtSpans:
    """The spans of one chat template's answers, with their thoughts or without them."""

    def __init__(self, text: Render, prompt: Render, are_trained: bool) -> None:
        """`text` renders messages, `prompt` also the generation prompt after them."""
        self._text, self._prompt, self._are_trained = text, prompt, are_trained

    @cached_property
    def _begins(self) -> tuple[str, str]:
        """A question with the generation prompt, and with what is written before an answer without thoughts;
        both empty where the template requires other messages."""
        answer: Message = {"role": "assistant", "content": _MARK}
        try:
            prompt = self._prompt(_QUESTION, None)
            return prompt, self._text([*_QUESTION, answer], None).partition(_MARK)[0]
        except DataError:
            return "", ""

    @cached_property
    def _around_prompt(self) -> tuple[str, str]:
        """The generation prompt, and the text between it and an answer without thoughts; both empty where
        that is space."""
        prompt, answered = self._begins
        try:
            before = self._text(_QUESTION, None)
        except DataError:  # the template requires other messages
            return "", ""
        between = answered.removeprefix(prompt)
        is_between = (
            prompt != before and prompt.startswith(before) and answered.startswith(prompt) and between.strip()
        )
        return (prompt.removeprefix(before), between) if is_between else ("", "")

    @property
    def before_answers(self) -> str:
        """Text between the generation prompt and an answer without thoughts; empty where there is none but
        space."""
        return self._around_prompt[1]

    @cached_property
    def before_thoughts(self) -> str:
        """Text that the generation prompt ends with, and that is not before an answer without thoughts, as an
        opening tag; empty where there is none but space."""
        prompt, answered = self._begins
        return prompt.removeprefix(answered).strip() if prompt.startswith(answered) else ""

    def widened(self, spans: list[Span], text: str) -> list[Span]:
        """Return the spans with what the template writes between the generation prompt and answers without
        thoughts."""
        prompt, between = self._around_prompt
        if not between or not self._are_trained:
            return spans
        return [
            (start - len(between) if text.endswith(prompt + between, 0, start) else start, end)
            for start, end in spans
        ]

    def fitted(
        self, spans: list[Span], text: str, chat: Chat, mark: str, where: str
    ) -> tuple[list[Span], ThoughtCounts]:
        """Return the spans of the answers in `text`, and the numbers of thoughts; `mark` is a character that
        is not in it.

        Raises:
            DataError: the last answer's thoughts are to be trained, and the template does not write them; or
                those of an answer that is compared are to be context, so that it would follow another prompt.
        """
        counts = Counter[str]()
        answers = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        for index in answers:
            message = chat.messages[index]
            if (parts := parts_of(message)) is None:
                continue
            is_context, at = "train" in message, None
            if parts.thoughts.strip() and not self._are_trained and 0 < chat.asked <= index:
                raise DataError(
                    f"{where}: the answer has thoughts, which data.train_on: answers makes a part of its "
                    "prompt, so that answers would be compared after different prompts; leave data.train_on "
                    "out, or remove the thoughts"
                )
            if parts.thoughts.strip():
                at = self._position(text, chat, index, with_mark(message, parts, mark), mark, where)
                if at is None and index == answers[-1] and self._are_trained and not is_context:
                    raise DataError(
                        f"{where}: the thoughts of the last answer are not in the text that the chat "
                        "template renders, so they would not be trained on; give a template that writes them "
                        "in data.chat_template, or set data.train_on: answers"
                    )
                if at is None:
                    counts["left_out"] += 1
                else:
                    counts["trained" if self._are_trained and not is_context else "context"] += 1
            if not is_context and (at is not None or not parts.thoughts.strip()):
                spans = self._one(spans, text, chat, index, parts, at, mark, where)
        return spans, ThoughtCounts(**counts)

    def _one(
        self,
        spans: list[Span],
        text: str,
        chat: Chat,
        index: int,
        parts: Parts,
        at: int | None,
        mark: str,
        where: str,
    ) -> list[Span]:
        """Return the spans with that of one answer changed; `at` is the start of its thoughts, None where it
        has tags alone."""
        message, thoughts, answer_text = chat.messages[index], parts.thoughts.strip(), parts.answer.strip()
        begin = self._begin(text, chat, index, at, mark)
        first = begin if at is None else at
        answer_span = next((span for span in spans if span[1] > begin), None)
        if (
            answer_span
            and answer_text
            and 0 <= text.find(answer_text, first + len(thoughts)) < answer_span[0]
        ):
            # the template marks no generation block of this answer, and this is one of a later answer
            answer_span = None
        has_thoughts = answer_span is not None and answer_span[0] <= first
        if self._are_trained:
            if answer_span and (has_thoughts or answer_text or message.get("tool_calls")):
                return sorted({*spans} - {answer_span} | {(min(answer_span[0], begin), answer_span[1])})
            if at is None or answer_text:
                return spans
        elif not has_thoughts:
            return spans
        elif not answer_text and not message.get("tool_calls"):
            return sorted({*spans} - {answer_span})
        answer = self._position(
            text,
            chat,
            index,
            with_answer(message, parts, behind_white_space(parts.answer, mark)),
            mark,
            where,
        )
        if answer is None:
            raise _unknown(index, where)
        if self._are_trained:  # thoughts without an answer
            return sorted([*spans, (begin, answer)])
        assert answer_span is not None
        return sorted(
            {*spans} - {answer_span} | ({(answer, answer_span[1])} if answer < answer_span[1] else set())
        )

    def _prompt_end(self, text: str, chat: Chat, index: int) -> int | None:
        """Return the end of the generation prompt of an answer; None where `text` has none."""
        before = chat.messages[:index]
        try:
            prompt = self._prompt(before, chat.tools)
            if prompt != self._text(before, chat.tools) and text.startswith(prompt):
                return len(prompt)
        except DataError:  # templates that want an answer after each question
            pass
        return None

    def _position(
        self, text: str, chat: Chat, index: int, marked: Message, mark: str, where: str
    ) -> int | None:
        """Return the position in `text` of the mark in one message; None if the template does not write
        it."""
        messages = [*chat.messages[:index], marked, *chat.messages[index + 1 :]]
        before, marker, _ = self._text(messages, chat.tools).partition(mark)
        if marker and not text.startswith(before):
            raise _unknown(index, where)
        return len(before) if marker else None

    def _begin(self, text: str, chat: Chat, index: int, at: int | None, mark: str) -> int:
        """Return the end of the generation prompt of an answer; without one, of what is before any answer
        there."""
        before, most = chat.messages[:index], len(text) if at is None else at
        prompt_end = self._prompt_end(text, chat, index)
        if prompt_end is not None and prompt_end <= most:
            return prompt_end
        try:
            plain = self._text([*before, {"role": "assistant", "content": mark}], chat.tools)
        except DataError:
            return most
        common = "".join(
            letter for letter, _ in takewhile(lambda two: two[0] == two[1], zip(text, plain, strict=False))
        )
        shown = common.rstrip()
        return min(most, len(shown.removesuffix("<think>")) if shown.endswith("<think>") else len(common))


def _unknown(index: int, where: str) -> DataError:
    return DataError(
        f"{where}: messages[{index}]: the characters of its thoughts cannot be identified; give a template "
        "that writes them unchanged in data.chat_template"
    )
