"""Chat templates: messages to text, and the positions of the generation blocks."""

import re
from typing import Any

from flytune.data.messages import Message, with_text_arguments
from flytune.errors import DataError
from flytune.models import chat_templates

Span = chat_templates.Span
_BEGIN = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_LEFT, _RIGHT = "\ue000", "\ue001"
_MARKS = re.compile(f"[{_LEFT}{_RIGHT}]")
_PROBE = [
    {"role": role, "content": content}
    for role, content in (("user", " a\n"), ("assistant", "b"), ("user", "c"), ("assistant", " d \n"))
]
Tools = list[dict[str, Any]] | None


class Template:
    """A Jinja template with the special tokens that it may write."""

    def __init__(self, source: str, tokens: dict[str, Any]) -> None:
        self._source, self._tokens = source, tokens
        self.has_marks = bool(_BEGIN.search(source))
        """True if the template marks the answers with {% generation %}."""
        # The text between the marks gets a scope of its own, as in transformers.
        printing = _BEGIN.sub(rf"{{%\1 with %}}{{% print '{_LEFT}' \2%}}", source)
        printing = _END.sub(rf"{{%\1 print '{_RIGHT}' %}}{{% endwith \2%}}", printing)
        self._takes_parts = False
        self._takes_parts = chat_templates.takes_parts(source, lambda chat: self.text(chat, None, ""))
        self._printing = printing if self.has_marks and self._agrees(printing) else None

    def text(self, messages: list[Message], tools: Tools, where: str) -> str:
        """Return the rendered messages.

        Raises:
            DataError: the template refuses them.
        """
        return self._render(self._source, messages, tools, where)[0]

    def prompt(self, messages: list[Message], tools: Tools, where: str) -> str:
        """Return the rendered messages with the generation prompt after them, where the template has one.

        Raises:
            DataError: as `text`.
        """
        return self._render(self._source, messages, tools, where, add_generation_prompt=True)[0]

    def blocks(self, messages: list[Message], tools: Tools, where: str) -> tuple[str, list[Span]]:
        """Return the rendered messages, and the characters of each generation block.

        Where possible, markers are rendered into the text and removed again: this takes half the time of
        transformers' own way.

        Raises:
            DataError: the template refuses the messages.
        """
        if self._printing is not None and _is_text(messages, tools) and not any(map(_holds_mark, messages)):
            return _unmarked(self._render(self._printing, messages, tools, where)[0])
        return self._render(self._source, messages, tools, where, tracked=True)

    def _agrees(self, printing: str) -> bool:
        """Return whether rendered markers give the blocks that transformers finds, in a chat of two
        exchanges."""
        try:
            printed = _unmarked(self._render(printing, _PROBE, None, "")[0])
            return printed == self._render(self._source, _PROBE, None, "", tracked=True)
        except DataError:
            return False

    def _render(
        self,
        source: str,
        messages: list[Message],
        tools: Tools,
        where: str,
        tracked: bool = False,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        messages = [
            chat_templates.in_parts(message)
            if self._takes_parts or chat_templates.IMAGE in message["content"]
            else message
            for message in messages
        ]
        options: Any = {"tools": tools, "add_generation_prompt": add_generation_prompt, **self._tokens}
        try:
            if not tracked and _is_text(messages, tools):
                return chat_templates.render(source, messages, is_text=True, **options)
            options["return_assistant_tokens_mask"] = tracked
            try:
                return chat_templates.render(source, messages, **options)
            except chat_templates.TemplateError as error:
                if error.kind != "TypeError":
                    raise
                # DeepSeek's templates concatenate the arguments of a tool call with a string.
                return chat_templates.render(
                    source, [with_text_arguments(message) for message in messages], **options
                )
        except DataError as error:
            raise DataError(f"{where}: {error}") from error


def _is_text(messages: list[Message], tools: Tools) -> bool:
    """Return whether the messages have nothing but a role and a content, both text, and there are no
    tools."""
    return tools is None and all(
        len(message) == 2 and type(message.get("role")) is str and type(message.get("content")) is str
        for message in messages
    )


def _holds_mark(message: Message) -> bool:
    return any(mark in text for mark in (_LEFT, _RIGHT) for text in message.values())


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    positions = [mark.start() - number for number, mark in enumerate(_MARKS.finditer(marked))]
    return _MARKS.sub("", marked), list(zip(positions[::2], positions[1::2], strict=True))
