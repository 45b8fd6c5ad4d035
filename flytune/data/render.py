"""Samples to text, and which of its characters are trained.

No prompt is ever tokenized alone to be counted: the whole text is rendered, the characters of the answers in it are
known, and tokens are labelled by the characters they stand for (tokenizing.py).

The answers of a chat are found in one of two ways:

- The template has generation marks (`{% generation %}`): what stands between them, as transformers reports it.
- Any other template is rendered twice, plainly and with two characters for private use around each answer. Taking them
  out again must give the plain rendering; then they stood exactly where the answers are. Where the template trims
  answers the characters stand inside the white space that is trimmed. A turn with tool calls is an answer as a whole: what
  stands in the place of a plain answer, between what the template puts before and behind one.

An empty answer trains nothing. After each other answer the end marker is trained too: the special token that the template
puts directly behind it, or behind spaces (Llama 2), which are trained with it; never what follows, like a new line.
Where the last answer has none, what the template puts behind that answer is cut off and a trained EOS takes its place.

A message with `train: False` is context. Its generation blocks are known by a character for private use in what it says; from
templates without marks it is given none. If it is the last answer, nothing is cut off and no EOS is added.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from flytune.data.chat_template import Span, Template
from flytune.data.formats import Chat, Plain
from flytune.data.messages import Message, is_answer, with_suffix
from flytune.errors import DataError

_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class Rendered:
    """One text, ready for the tokenizer."""

    text: str
    spans: list[Span]
    """The trained characters, in order."""
    add_special_tokens: bool
    """Whether the tokenizer adds its own (BOS): for raw text; chat templates write theirs."""
    append_eos: bool
    """Whether a trained EOS token follows, unless the tokenizer has put one there."""


def render(sample: Chat | Plain, template: "ChatTemplate | None", completion_only: bool, where: str) -> Rendered:
    """The text of a sample. Without `completion_only` all of it is trained.

    Raises:
        DataError: the chat template refuses the messages, or changes answers so that they cannot be found again; or a message
            is not to be trained, where all is.
    """
    if isinstance(sample, Plain):
        text = sample.prompt + sample.completion
        start = len(sample.prompt) if completion_only else 0
        # An empty completion gets no span: EOS alone would teach to say nothing.
        return Rendered(text, [(start, len(text))] if start < len(text) else [], True, True)
    assert template is not None
    if completion_only:
        return template.answers(sample, where)
    if any("train" in message for message in sample.messages):
        raise DataError(
            f"{where}: a turn has train: false (or weight: 0), but data.completion_only_loss: false trains every token; take "
            " these keys out of the data, or leave completion_only_loss at true"
        )
    text = template.text(sample, where)
    ends = sample.messages[-1]["role"] != "assistant" or template.is_ended(text)
    return Rendered(text, [(0, len(text))], False, not ends)


class ChatTemplate:
    """A tokenizer's chat template, with the special tokens that it may write."""

    def __init__(self, tokenizer: Any) -> None:
        self._template = Template(tokenizer.get_chat_template(), tokenizer.special_tokens_map)
        eos, bos = tokenizer.eos_token, tokenizer.bos_token
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special} | {eos}
        # What begins a text ends no answer, unless one token does both (GPT-2's <|endoftext|>).
        self.marks = special - ({bos} - {eos}) | self._behind_answers({str(token) for token in added} - special)
        """The tokens that end an answer where they stand behind it."""
        marks = "|".join(re.escape(token) for token in sorted(self.marks, key=len, reverse=True))
        self._mark = re.compile(rf" *(?:{marks})")
        self._ends = tuple(self.marks)

    def text(self, chat: Chat, where: str) -> str:
        """The messages, rendered."""
        return self._template.text(_bare(chat.messages), chat.tools, where)

    def is_ended(self, text: str) -> bool:
        """Whether an end marker stands last, white space aside."""
        return text.rstrip().endswith(self._ends)

    def answers(self, chat: Chat, where: str) -> Rendered:
        """The messages, rendered, with the answers and their end markers as spans."""
        is_marked = self._template.has_marks
        if is_marked:
            text, blocks = self._template.blocks(_bare(chat.messages), chat.tools, where)
            found = self._inside_marks(text, blocks, chat, where)
        else:
            text = self.text(chat, where)
            found = self._by_sentinels(text, chat, where)
        spans, is_ended = [], True
        for start, end in found:
            mark = None if is_marked and self.is_ended(text[start:end]) else self._mark.match(text, end)
            is_ended = mark is not None or (is_marked and self.is_ended(text[start:end]))
            spans.append((start, mark.end() if mark else end))
        last = next((message for message in reversed(chat.messages) if is_answer(message)), {})
        if is_ended or "train" in last:
            return Rendered(text, spans, False, False)
        return Rendered(text[: spans[-1][1]], spans, False, True)

    def _behind_answers(self, tokens: set[str]) -> set[str]:
        """The one of these tokens that the template puts directly behind each answer; a turn's own beginning is none."""
        asked = {"role": "user", "content": "a"}
        said = [{"role": "assistant", "content": chr(code)} for code in _PRIVATE_USE[:2]]
        try:
            text = self._template.text([asked, said[0], asked, said[1]], None, "")
        except DataError:  # it wants other messages
            return set()
        behind = [text.partition(message["content"])[2].lstrip(" ") for message in said]
        found = [token for token in tokens if all(rest.startswith(token) for rest in behind)]
        return {max(found, key=len)} if found else set()

    def _says(self, block: str) -> bool:
        """Whether anything but end markers and white space stands in it."""
        begin = block.lstrip()
        return bool(begin) and (not begin.startswith(self._ends) or bool(self._mark.sub("", block).strip()))

    def _inside_marks(self, text: str, blocks: list[Span], chat: Chat, where: str) -> list[Span]:
        says = [self._says(text[start:end]) for start, end in blocks]
        trained = [True] * len(blocks)
        if any(is_answer(message) and "train" in message for message in chat.messages):
            trained = self._trained(text, blocks, says, chat, where)
        return [block for block, is_said, is_trained in zip(blocks, says, trained, strict=True) if is_said and is_trained]

    def _trained(self, text: str, blocks: list[Span], says: list[bool], chat: Chat, where: str) -> list[bool]:
        """Which generation blocks hold the words of trained messages: rendered with a character in them that says so."""
        context, trained = _unused(text)
        words = [
            with_suffix(message, context if "train" in message else trained) if is_answer(message) else message
            for message in chat.messages
        ]
        marked, found = self._template.blocks(_bare(words), chat.tools, where)
        held = [{context, trained} & set(marked[start:end]) for start, end in found]
        if len(held) != len(blocks) or any(len(marks) != 1 for marks, is_said in zip(held, says, strict=True) if is_said):
            raise DataError(
                f"{where}: train: false (or weight: 0) on a turn, but which generation blocks of the chat template are that "
                "turn's cannot be told; give a template with one block for each answer in data.chat_template"
            )
        return [trained in marks for marks in held]

    def _by_sentinels(self, text: str, chat: Chat, where: str) -> list[Span]:
        messages = chat.messages
        left, right = list(_unused(text + "".join(message["content"] for message in messages)))
        said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        said = [index for index in said if "train" not in messages[index]]
        calling = [index for index in said if messages[index].get("tool_calls")]
        answers = [index for index in said if index not in calling and messages[index]["content"].strip()]
        turns = [self._calling_turn(text, chat, index, left, where) for index in calling]
        if not answers:
            return turns
        tried: list[list[Message]] = []
        for trims_left, trims_right in product((False, True), repeat=2):
            marked = list(messages)
            for index in answers:
                content = messages[index]["content"]
                start = len(content) - len(content.lstrip()) if trims_left else 0
                end = len(content.rstrip()) if trims_right else len(content)
                marked[index] = {
                    **messages[index],
                    "content": content[:start] + left + content[start:end] + right + content[end:],
                }
            if marked in tried:
                continue
            tried.append(marked)
            spans = _without(self._template.text(_bare(marked), chat.tools, where), left, right, text)
            if spans is not None:
                return sorted(turns + spans)
        raise DataError(f"{where}: the chat template changes what the assistant says, so its characters{_UNKNOWN}")

    def _calling_turn(self, text: str, chat: Chat, index: int, sentinel: str, where: str) -> Span:
        """A turn with tool calls: what is left of `text` without all that surrounds a plain answer in its place."""
        answer = [{"role": "assistant", "content": sentinel}]
        messages, reason = _bare(chat.messages), ""
        for rest in (messages[index + 1 :], []):  # some templates want a tool's answer only after a call
            try:
                whole = text if rest else self._template.text(messages[: index + 1], chat.tools, where)
                plain = self._template.text(messages[:index] + answer + rest, chat.tools, where)
            except DataError as error:
                reason = f" ({error})"
                continue
            before, _, after = plain.partition(sentinel)
            if not text.startswith(whole) or sentinel not in plain:
                continue
            for head in (before, before.rstrip()):
                if whole.startswith(head) and whole.endswith(after) and len(head) + len(after) < len(whole):
                    return len(head), len(whole) - len(after)
        raise DataError(f"{where}: messages[{index}]: the characters of its tool calls{_UNKNOWN}{reason}")


_UNKNOWN = (
    " cannot be told from the rest; "
    "give a template with generation marks ({% generation %} ... {% endgeneration %}) in data.chat_template"
)


def _bare(messages: list[Message]) -> list[Message]:
    """Without what is said to us, not to the template."""
    if not any("train" in message for message in messages):
        return messages
    return [{key: item for key, item in message.items() if key != "train"} for message in messages]


def _unused(text: str) -> Iterator[str]:
    """Two characters for private use that `text` does not hold."""
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in text)
    yield next(free)
    yield next(free)


def _without(marked: str, left: str, right: str, plain: str) -> list[Span] | None:
    """Where the marks stood, if `marked` without them is `plain` and they come in pairs; None otherwise."""
    if marked.replace(left, "").replace(right, "") != plain:
        return None
    marks = list(re.finditer(f"[{left}{right}]", marked))
    if "".join(mark[0] for mark in marks) != (left + right) * (len(marks) // 2):
        return None
    places = [mark.start() - number for number, mark in enumerate(marks)]
    return list(zip(places[::2], places[1::2], strict=True))
