"""Chat templates: messages to text, and the positions of the generation blocks."""

import re
from typing import Any

from flytune.data.messages import Message, with_text_arguments
from flytune.errors import DataError
from flytune.models import chat_templates

Span = chat_templates.Span
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Tools = list[dict[str, Any]] | None


class Template:
    """A Jinja template with the special tokens that it may write."""

    def __init__(self, source: str, tokens: dict[str, Any]) -> None:
        self._source, self._tokens = source, tokens
        self.has_marks = bool(_GENERATION.search(source))
        """True if the template marks the answers with {% generation %}."""
        self._takes_parts = False
        self._takes_parts = chat_templates.takes_parts(source, lambda chat: self.text(chat, None, ""))

    def text(self, messages: list[Message], tools: Tools, where: str) -> str:
        """Return the rendered messages.

        Raises:
            DataError: the template refuses them.
        """
        return self._render(messages, tools, where)[0]

    def prompt(self, messages: list[Message], tools: Tools, where: str) -> str:
        """Return the rendered messages with the generation prompt after them, where the template has one.

        Raises:
            DataError: as `text`.
        """
        return self._render(messages, tools, where, add_generation_prompt=True)[0]

    def blocks(self, messages: list[Message], tools: Tools, where: str) -> tuple[str, list[Span]]:
        """Return the rendered messages, and the characters of each generation block.

        Raises:
            DataError: as `text`.
        """
        return self._render(messages, tools, where, return_assistant_tokens_mask=True)

    def _render(
        self, messages: list[Message], tools: Tools, where: str, **options: bool
    ) -> tuple[str, list[Span]]:
        messages = [
            chat_templates.in_parts(message)
            if self._takes_parts or chat_templates.IMAGE in message["content"]
            else message
            for message in messages
        ]
        written: dict[str, Any] = {"tools": tools, **options, **self._tokens}
        try:
            try:
                return chat_templates.render(self._source, messages, **written)
            except chat_templates.TemplateError as error:
                if error.kind != "TypeError":
                    raise
                # DeepSeek's templates concatenate the arguments of a tool call with a string.
                messages = [with_text_arguments(message) for message in messages]
                return chat_templates.render(self._source, messages, **written)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
