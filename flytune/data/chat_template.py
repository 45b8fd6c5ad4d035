"""A chat template: messages to text, and what stands between its generation marks."""

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
        """Whether it says what an answer is ({% generation %})."""
        # A scope of its own for what stands between the marks, as transformers' has one.
        printing = _BEGIN.sub(rf"{{%\1 with %}}{{% print '{_LEFT}' \2%}}", source)
        printing = _END.sub(rf"{{%\1 print '{_RIGHT}' %}}{{% endwith \2%}}", printing)
        self._printing = printing if self.has_marks and self._agrees(printing) else None

    def text(self, messages: list[Message], tools: Tools, where: str) -> str:
        """The messages, rendered.

        Raises:
            DataError: the template refuses them.
        """
        return self._render(self._source, messages, tools, where)[0]

    def blocks(self, messages: list[Message], tools: Tools, where: str) -> tuple[str, list[Span]]:
        """The messages, rendered, and the characters of each generation block.

        The marks are printed and taken out again where that can be done: half the time of asking transformers where they stand.

        Raises:
            DataError: the template refuses the messages.
        """
        if self._printing is not None and _is_text(messages, tools) and not any(map(_holds_mark, messages)):
            return _unmarked(self._render(self._printing, messages, tools, where)[0])
        return self._render(self._source, messages, tools, where, tracked=True)

    def _agrees(self, printing: str) -> bool:
        """Whether printed marks stand where transformers finds them, in a chat of two exchanges."""
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
                # What render_jinja_template does besides is for other values than text; it takes three times as long.
                told = {"tools": None, "documents": None, "add_generation_prompt": False, **self._tokens}
                return _compile_jinja_template(source).render(messages=messages, **told), []
            try:
                rendered: Any = render_jinja_template([messages], **options)
            except TypeError:  # DeepSeek's templates add the arguments of a tool call to a string
                rendered = render_jinja_template([[with_text_arguments(one) for one in messages]], **options)
        except Exception as error:  # a template is a program: beside Jinja's own errors it may raise any
            roles = ", ".join(str(message["role"]) for message in messages[:8])
            raise DataError(f"{where}: the chat template refuses these messages ({roles}): {error}") from error
        texts, blocks = rendered
        return texts[0], blocks[0] if tracked else []


def _is_text(messages: list[Message], tools: Tools) -> bool:
    """Whether there is nothing but roles and what they say."""
    return tools is None and all(
        len(one) == 2 and type(one.get("role")) is str and type(one.get("content")) is str for one in messages
    )


def _holds_mark(message: Message) -> bool:
    return any(mark in text for mark in (_LEFT, _RIGHT) for text in message.values())


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    places = [mark.start() - number for number, mark in enumerate(_MARKS.finditer(marked))]
    return _MARKS.sub("", marked), list(zip(places[::2], places[1::2], strict=True))
