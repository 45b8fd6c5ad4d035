"""Chat templates: messages to text, and the positions of the generation blocks."""

import re
from typing import Any

from flytune.data.messages import Message, with_text_arguments
from flytune.errors import DataError

Span = tuple[int, int]
"""Characters [start, end) of a text."""
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
        self._printing = printing if self.has_marks and self._agrees(printing) else None

    def text(self, messages: list[Message], tools: Tools, where: str) -> str:
        """Return the rendered messages.

        Raises:
            DataError: the template refuses them.
        """
        return self._render(self._source, messages, tools, where)[0]

    def blocks(self, messages: list[Message], tools: Tools, where: str) -> tuple[str, list[Span]]:
        """Return the rendered messages, and the characters of each generation block.

        Where possible, markers are rendered into the text and removed again: this takes half the time of transformers' own way.

        Raises:
            DataError: the template refuses the messages.
        """
        if self._printing is not None and _is_text(messages, tools) and not any(map(_holds_mark, messages)):
            return _unmarked(self._render(self._printing, messages, tools, where)[0])
        return self._render(self._source, messages, tools, where, tracked=True)

    def _agrees(self, printing: str) -> bool:
        """Return whether rendered markers give the blocks that transformers finds, in a chat of two exchanges."""
        try:
            found = _unmarked(self._render(printing, _PROBE, None, "")[0])
            return found == self._render(self._source, _PROBE, None, "", tracked=True)
        except DataError:
            return False

    def _render(
        self, source: str, messages: list[Message], tools: Tools, where: str, tracked: bool = False
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

        options: Any = {"chat_template": source, "return_assistant_tokens_mask": tracked, "tools": tools, **self._tokens}
        try:
            if not tracked and _is_text(messages, tools):
                # render_jinja_template takes three times as long, for values that are not text.
                variables = {"tools": None, "documents": None, "add_generation_prompt": False, **self._tokens}
                return _compile_jinja_template(source).render(messages=messages, **variables), []
            try:
                rendered: Any = render_jinja_template([messages], **options)
            except TypeError:  # DeepSeek's templates concatenate the arguments of a tool call with a string
                rendered = render_jinja_template([[with_text_arguments(one) for one in messages]], **options)
        except Exception as error:  # a template is a program: it may raise any error, not only Jinja's
            roles = ", ".join(str(message["role"]) for message in messages[:8])
            raise DataError(f"{where}: the chat template refuses these messages ({roles}): {error}") from error
        texts, blocks = rendered
        return texts[0], blocks[0] if tracked else []


def _is_text(messages: list[Message], tools: Tools) -> bool:
    """Return whether the messages have nothing but a role and a content, both text, and there are no tools."""
    return tools is None and all(
        len(one) == 2 and type(one.get("role")) is str and type(one.get("content")) is str for one in messages
    )


def _holds_mark(message: Message) -> bool:
    return any(mark in text for mark in (_LEFT, _RIGHT) for text in message.values())


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    positions = [mark.start() - number for number, mark in enumerate(_MARKS.finditer(marked))]
    return _MARKS.sub("", marked), list(zip(positions[::2], positions[1::2], strict=True))
