"""Samples to text, with the characters that are trained.

No prompt is tokenized alone to count its tokens: the complete text is rendered, with the positions of the
answers in it, and tokens are labelled by their characters (labels.py).

The answers of a chat are found in one of two ways:

- The template has generation marks (`{% generation %}`): the answers are the blocks that transformers
  reports.
- Any other template is rendered twice, plainly and with two private-use characters (sentinels) around each
  answer. If the text without the sentinels is the plain text, they were exactly around the answers. If the
  template trims answers, the sentinels are put inside the white space that is trimmed. A turn with tool calls
  is one answer: the part of the text that replaces a plain answer, between the template's text before and
  after one.

An empty answer trains nothing. After every other answer the end marker is trained too: the special token that
the template writes directly after it, or after spaces (Llama 2), which are trained with it; the text after
that, like a new line, never is. If the last answer has no end marker, the template's text after that answer
is replaced by a trained EOS.

Thoughts of an answer are written in a form that the template knows (thoughts.py). They are trained as the
answer is, from the end of the generation prompt on (thought_spans.py); with data.train_on: answers they are
context.

A message with `train: False` is context. Its generation blocks are found by a private-use character in its
content; with templates without marks it gets no sentinels. If it is the last answer, nothing is cut off and
no EOS is added.

What a row says is in the rendered text, or the row is refused (Completeness): a template may trim text, write
it as JSON, or leave out the thoughts of earlier turns. It may not leave out messages, or tools and calls.
"""

import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice, product
from typing import Any

from flytune import json_core
from flytune.data.chat_template import Span, Template, Tools
from flytune.data.formats import Chat, Plain
from flytune.data.messages import Message, is_answer, with_suffix
from flytune.data.thoughts import (
    NO_THOUGHTS,
    Render,
    ThoughtCounts,
    ThoughtForms,
    ThoughtSpans,
    answer_of,
    parts_of,
    with_answer,
)
from flytune.errors import DataError
from flytune.models.chat_templates import IMAGE

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
            for content in map(str.strip, answer_of(message).split(IMAGE)):
                # Contents mostly follow one another: a search of all of the text for each would take the
                # square of the turns.
                start = text.find(content, at)
                if start >= 0:
                    at = start + len(content)
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
            marks[sign := chr(next(codes))] = f"{what} {value!r:.60}"
            return value + sign

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
            missing = [what for sign, what in marks.items() if not _shows(sign, rendered)]
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


_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xF8000))


@dataclass(frozen=True, slots=True)
class Rendered:
    """One text, ready for the tokenizer."""

    text: str
    spans: list[Span]
    """Ranges of the trained characters, in order."""
    add_special_tokens: bool
    """True if the tokenizer adds its special tokens (BOS): for raw text; chat templates write their own."""
    append_eos: bool
    """True if a trained EOS token follows, unless the tokenizer has added one."""
    is_renamed: bool = False
    """True if the template's special tokens have the names of control_tokens.py, and all others are text."""
    thoughts: ThoughtCounts = NO_THOUGHTS


def render(
    sample: Chat | Plain, template: "ChatTemplate | None", completion_only: bool, where: str
) -> Rendered:
    """Return the text of a sample. Without `completion_only` all of it is trained.

    Raises:
        DataError: the chat template refuses the messages, or changes answers so that they cannot be found; or
            a message is excluded from training while all tokens are to be trained.
    """
    if isinstance(sample, Plain):
        text = sample.text
        if sample.completion is None:
            return Rendered(text, [], True, False)
        start = len(sample.prompt) if completion_only else 0
        # An empty completion gets no span: a trained EOS alone would teach empty answers.
        return Rendered(text, [(start, len(text))] if start < len(text) else [], True, True)
    assert template is not None
    if sample.is_question:
        text = template.text(sample, where)
        template.completeness.check(sample, text, where)
        return Rendered(text, [], False, False)
    if completion_only:
        return template.answers(sample, where)
    if any("train" in message for message in sample.messages):
        raise DataError(
            f"{where}: a turn has train: false (or weight: 0), but data.completion_only_loss: false trains "
            "every token; remove these keys from the data, or leave completion_only_loss at true"
        )
    sample = template.written(sample)
    text = template.text(sample, where)
    template.completeness.check(sample, text, where)
    ends = sample.messages[-1]["role"] != "assistant" or template.is_ended(text)
    spans, thoughts = template.with_thoughts([(0, len(text))], text, sample, where)
    return Rendered(text, spans, False, not ends, thoughts=thoughts)


class ChatTemplate:
    """A tokenizer's chat template with the tokens that end answers."""

    def __init__(self, tokenizer: Any, trains_thoughts: bool = True, day: str | None = None) -> None:
        """Make the template of a tokenizer; `day` is what it writes in place of today."""
        source, tokens = tokenizer.get_chat_template(), tokenizer.special_tokens_map
        self._template = Template(source, tokens | ({"template_date": day} if day else {}))
        self.has_date = "strftime_now" in source and _differ_by_day(source, tokens)
        """True if the text has today's date, or that of `day`."""

        def text(messages: list[Message], tools: Tools) -> str:
            return self._template.text(_bare(messages), tools, "")

        def prompt(messages: list[Message], tools: Tools) -> str:
            return self._template.prompt(_bare(messages), tools, "")

        self._forms = ThoughtForms(text)
        self._thoughts = ThoughtSpans(text, prompt, trains_thoughts)
        self.completeness = Completeness(text)
        """The check that the text has all of a chat."""
        eos, bos = tokenizer.eos_token, tokenizer.bos_token
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special} | {eos}
        # BOS does not end an answer, unless it is also EOS (GPT-2's <|endoftext|>).
        self.marks = special - ({bos} - {eos}) | self._after_answers(
            {str(token) for token in added} - special
        )
        """End markers: the tokens that end an answer if they follow it."""
        marks = "|".join(re.escape(token) for token in sorted(self.marks, key=len, reverse=True))
        self._mark = re.compile(rf" *(?:{marks})")
        self._ends = tuple(self.marks)

    def written(self, chat: Chat) -> Chat:
        """Return the chat with thoughts in a form that the template writes."""
        messages = self._forms.written(chat.messages)
        return chat if messages is chat.messages else replace(chat, messages=messages)

    def text(self, chat: Chat, where: str) -> str:
        """Return the rendered messages; of a prompt without an answer, with the generation prompt after
        them."""
        render = self._template.prompt if chat.is_question else self._template.text
        return render(_bare(self._forms.written(chat.messages)), chat.tools, where)

    def with_thoughts(
        self, spans: list[Span], text: str, chat: Chat, where: str
    ) -> tuple[list[Span], ThoughtCounts]:
        """Return the trained spans, with thoughts or without them, and the numbers of thoughts
        (ThoughtSpans.fitted)."""
        # Generation marks say what is trained, unless answers to one prompt are compared.
        if chat.asked or not self._template.has_marks:
            spans = self._thoughts.widened(spans, text)
        if all(parts_of(message) is None for message in chat.messages):
            return spans, NO_THOUGHTS
        return self._thoughts.fitted(spans, text, chat, next(_unused(text, where)), where)

    @property
    def before_answers(self) -> str:
        """Text that is written between the generation prompt and an answer without thoughts; empty of most
        templates."""
        return self._thoughts.before_answers

    @property
    def before_thoughts(self) -> str:
        """Text that the generation prompt ends with, and that is not before an answer without thoughts; empty
        of most templates."""
        return self._thoughts.before_thoughts

    def is_ended(self, text: str) -> bool:
        """Return whether the text ends with an end marker, apart from white space."""
        return text.rstrip().endswith(self._ends)

    def answers(self, chat: Chat, where: str) -> Rendered:
        """Return the rendered messages, with the answers and their end markers as spans."""
        chat = self.written(chat)
        is_marked = self._template.has_marks
        if is_marked:
            text, blocks = self._template.blocks(_bare(chat.messages), chat.tools, where)
            answer_spans = self._inside_marks(text, blocks, chat, where)
        else:
            text = self.text(chat, where)
            answer_spans = self._by_sentinels(text, chat, where)
        self.completeness.check(chat, text, where)
        answer_spans, thoughts = self.with_thoughts(answer_spans, text, chat, where)
        spans, is_ended = [], True
        for start, end in answer_spans:
            mark = None if is_marked and self.is_ended(text[start:end]) else self._mark.match(text, end)
            is_ended = mark is not None or (is_marked and self.is_ended(text[start:end]))
            spans.append((start, mark.end() if mark else end))
        last = next((message for message in reversed(chat.messages) if is_answer(message)), {})
        if is_ended or "train" in last:
            return Rendered(text, spans, False, False, thoughts=thoughts)
        return Rendered(text[: spans[-1][1]], spans, False, True, thoughts=thoughts)

    def _after_answers(self, tokens: set[str]) -> set[str]:
        """Return the one of these tokens that the template writes directly after each answer, if there is
        one.

        A token that begins the next turn is not after the last answer, and so is not found.
        """
        question = {"role": "user", "content": "a"}
        answers = [{"role": "assistant", "content": chr(code)} for code in _PRIVATE_USE[:2]]
        try:
            text = self._template.text([question, answers[0], question, answers[1]], None, "")
        except DataError:  # the template requires other messages
            return set()
        following = [text.partition(message["content"])[2].lstrip(" ") for message in answers]
        markers = [token for token in tokens if all(rest.startswith(token) for rest in following)]
        return {max(markers, key=len)} if markers else set()

    def _has_content(self, block: str) -> bool:
        """Return whether a block has more than end markers and white space."""
        begin = block.lstrip()
        return bool(begin) and (not begin.startswith(self._ends) or bool(self._mark.sub("", block).strip()))

    def _inside_marks(self, text: str, blocks: list[Span], chat: Chat, where: str) -> list[Span]:
        filled = [self._has_content(text[start:end]) for start, end in blocks]
        trained = [True] * len(blocks)
        if any(is_answer(message) and "train" in message for message in chat.messages):
            trained = self._trained(text, blocks, filled, chat, where)
        return [
            block
            for block, is_filled, is_trained in zip(blocks, filled, trained, strict=True)
            if is_filled and is_trained
        ]

    def _trained(
        self, text: str, blocks: list[Span], filled: list[bool], chat: Chat, where: str
    ) -> list[bool]:
        """Return for each generation block whether it is of a trained message: two characters mark trained
        and context."""
        context, trained = _unused(text, where)
        suffixed = list(chat.messages)
        for index, message in enumerate(chat.messages):
            if is_answer(message):
                suffixed[index] = with_suffix(message, context if "train" in message else trained)
        marked, block_spans = self._template.blocks(_bare(suffixed), chat.tools, where)
        marks_of = [{context, trained} & set(marked[start:end]) for start, end in block_spans]
        if len(marks_of) != len(blocks) or any(
            len(marks) != 1 for marks, is_filled in zip(marks_of, filled, strict=True) if is_filled
        ):
            raise DataError(
                f"{where}: a turn has train: false (or weight: 0), but the generation blocks of that turn "
                "cannot be identified; give a template with one block for each answer in data.chat_template"
            )
        return [trained in marks for marks in marks_of]

    def _by_sentinels(self, text: str, chat: Chat, where: str) -> list[Span]:
        messages = chat.messages
        left, right = list(_unused(text + "".join(message["content"] for message in messages), where))
        trained = [
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and "train" not in message
        ]
        calling = [index for index in trained if messages[index].get("tool_calls")]
        answers = [index for index in trained if index not in calling and answer_of(messages[index]).strip()]
        turns = [self._calling_turn(text, chat, index, left, where) for index in calling]
        if not answers:
            return turns
        tried: list[list[Message]] = []
        for trims_left, trims_right in product((False, True), repeat=2):
            marked = list(messages)
            for index in answers:
                content, answer = messages[index]["content"], answer_of(messages[index])
                start = len(content) - len(answer.lstrip() if trims_left else answer)
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
        raise DataError(
            f"{where}: the chat template changes the assistant's messages, so their characters{_UNKNOWN}"
        )

    def _calling_turn(self, text: str, chat: Chat, index: int, sentinel: str, where: str) -> Span:
        """Return the characters of a turn with tool calls: `text` without the text around a plain answer in
        its place."""
        messages, reason = _bare(chat.messages), ""
        plainly = {key: item for key, item in messages[index].items() if key != "tool_calls"}
        parts = parts_of(plainly)
        answer = [
            with_answer(plainly, parts, sentinel) if parts else {"role": "assistant", "content": sentinel}
        ]
        for rest in (messages[index + 1 :], []):  # some templates want a tool's answer only after a call
            try:
                full = text if rest else self._template.text(messages[: index + 1], chat.tools, where)
                plain = self._template.text(messages[:index] + answer + rest, chat.tools, where)
            except DataError as error:
                reason = f" ({error})"
                continue
            before, _, after = plain.partition(sentinel)
            if not text.startswith(full) or sentinel not in plain:
                continue
            for head in (before, before.rstrip()):
                if full.startswith(head) and full.endswith(after) and len(head) + len(after) < len(full):
                    return len(head), len(full) - len(after)
        raise DataError(f"{where}: messages[{index}]: the characters of its tool calls{_UNKNOWN}{reason}")


def _differ_by_day(source: str, tokens: dict[str, Any]) -> bool:
    """Return whether a chat has another text on another day; also where the template requires other
    messages."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        texts = {
            Template(source, tokens | {"template_date": f"{year}-01-01"}).text(chat, None, "")
            for year in (2001, 2002)
        }
    except DataError:
        return True
    return len(texts) > 1


_UNKNOWN = (
    " cannot be identified; "
    "give a template with generation marks ({% generation %} ... {% endgeneration %}) in data.chat_template"
)


def _bare(messages: list[Message]) -> list[Message]:
    """Return the messages without the key `train`, which is not for the template."""
    if not any("train" in message for message in messages):
        return messages
    return [{key: item for key, item in message.items() if key != "train"} for message in messages]


def _unused(text: str, where: str) -> Iterator[str]:
    """Yield two private-use characters that are not in `text`.

    Raises:
        DataError: all are.
    """
    free = [chr(code) for code in islice((code for code in _PRIVATE_USE if chr(code) not in text), 2)]
    if len(free) < 2:
        raise DataError(
            f"{where}: the text uses all private-use characters, two of which are needed to find its "
            "answers; remove some"
        )
    yield from free


def _without(marked: str, left: str, right: str, plain: str) -> list[Span] | None:
    """Return the spans between the marks if they are in pairs and `marked` without them is `plain`; otherwise
    None."""
    if marked.replace(left, "").replace(right, "") != plain:
        return None
    marks = list(re.finditer(f"[{left}{right}]", marked))
    if "".join(mark[0] for mark in marks) != (left + right) * (len(marks) // 2):
        return None
    positions = [mark.start() - number for number, mark in enumerate(marks)]
    return list(zip(positions[::2], positions[1::2], strict=True))
