"""Control tokens that are written in a row's text: `<|im_end|>` in a question is text, and ends nothing.

A tokenizer takes every occurrence of a special token for that token. So rows that have one in their own text
are rendered with a private-use character inside of it, which separates the template's own tokens from those
of the row. The template's are then renamed to characters that no text has, for a copy of the tokenizer that
knows them by these names only: the row's stay text, and everything else about the tokenizer stays as it is.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flytune.data.formats import Chat, Plain
from flytune.data.messages import THOUGHT_KEYS, Message
from flytune.data.render import ChatTemplate, Rendered, render
from flytune.data.thoughts import in_form, parts_of
from flytune.errors import DataError

_QUOTE = "\U0010fffe"
"""A character that Unicode has reserved for no use; it surrounds the names of the template's tokens."""
_FIRST_NAME = 0xF0000
_BREAKS = range(0x100000, 0x10FF00)


class ControlTokens:
    """The special tokens of a tokenizer, and the tokens with which its chat template ends answers."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None) -> None:
        self.has_template = template is not None
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special} | (template.marks if template else set())
        # A tokenizer may end texts with a line break; text is made of such tokens.
        self._tokens = sorted(
            (text for text in special if len(text.strip()) > 1), key=lambda text: (-len(text), text)
        )
        self._pattern = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")
        self._beginnings = sorted({token[:2] for token in self._tokens})
        self._names = {
            token: f"{_QUOTE}{chr(_FIRST_NAME + at)}{_QUOTE}" for at, token in enumerate(self._tokens)
        }
        self._backend = tokenizer.backend_tokenizer
        self._renamed: Any = None
        self._ids: dict[int, int] = {}

    def are_in(self, sample: Chat | Plain) -> bool:
        """Return whether a row's own text has a control token."""
        if isinstance(sample, Plain):
            return self._has(sample.text)
        if all(len(message) == 2 for message in sample.messages) and not sample.tools:
            return any(self._has(message["content"]) for message in sample.messages) and self._has(
                _all_text(_without_tags(sample))
            )
        return self._has(_all_text([_without_tags(sample), sample.tools]))

    def render_as_text(
        self, sample: Chat | Plain, template: ChatTemplate | None, completion_only: bool, where: str
    ) -> Rendered:
        """Return the text of a sample that has control tokens, for `encodings`.

        Raises:
            DataError: as render; or the template changes the text so that its own tokens cannot be told from
                the row's.
        """
        if isinstance(sample, Chat):
            sample = replace(sample, messages=_without_tags(sample))
        text = _all_text([sample.messages, sample.tools]) if isinstance(sample, Chat) else sample.text
        if _QUOTE in text:
            raise DataError(
                f"{where}: the text has both control tokens and U+10FFFE, which is not a character; remove "
                "one"
            )
        if isinstance(sample, Plain):
            return replace(render(sample, None, completion_only, where), is_renamed=True)
        assert template is not None
        broken = next((chr(code) for code in _BREAKS if chr(code) not in text), None)
        if broken is None:
            raise DataError(
                f"{where}: the text uses all private-use characters; one is needed to find its control tokens"
            )
        marked = replace(
            sample, messages=self._broken(sample.messages, broken), tools=self._broken(sample.tools, broken)
        )
        rendered = render(marked, template, completion_only, where)
        if not template.text(sample, where).startswith(rendered.text.replace(broken, "")):
            raise DataError(
                f"{where}: the text has control tokens ({self._pattern.findall(text)[0]}), and the chat "
                "template changes it, so that they cannot be told from the template's own; remove them, or "
                "set data.split_special_tokens: false"
            )
        return self._rename(rendered, broken)

    def encodings(self, texts: Sequence[str], add_special_tokens: bool) -> tuple[list[Any], dict[int, int]]:
        """Tokenize the texts of `render_as_text`; also return the tokenizer's ids by those of the encodings
        that differ."""
        if not texts:
            return [], {}
        if self._renamed is None:
            self._make_renamed()
        return self._renamed.encode_batch(list(texts), add_special_tokens=add_special_tokens), self._ids

    def _has(self, text: str) -> bool:
        return (
            any(beginning in text for beginning in self._beginnings)
            and self._pattern.search(text) is not None
        )

    def _broken(self, value: Any, mark: str) -> Any:
        """Return a value of JSON with `mark` after the first character of each control token in its texts and
        keys."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
        if isinstance(value, dict):
            return {self._broken(key, mark): self._broken(item, mark) for key, item in value.items()}
        return [self._broken(item, mark) for item in value] if isinstance(value, list) else value

    def _rename(self, rendered: Rendered, mark: str) -> Rendered:
        """Return the text with the template's tokens renamed and without the marks, and its spans."""
        pieces, ends, shifts, at = [], [0], [0], 0
        for match in re.finditer(f"{mark}|{self._pattern.pattern}", rendered.text):
            new = self._names.get(match[0], "")
            pieces += [rendered.text[at : match.start()], new]
            at = match.end()
            ends.append(at)
            shifts.append(shifts[-1] + len(new) - len(match[0]))

        def moved(position: int) -> int:
            return position + shifts[bisect_right(ends, position) - 1]

        text = "".join([*pieces, rendered.text[at:]])
        return replace(
            rendered,
            text=text,
            spans=[(moved(start), moved(end)) for start, end in rendered.spans],
            is_renamed=True,
        )

    def _make_renamed(self) -> None:
        from tokenizers import Tokenizer

        content = json.loads(self._backend.to_str())
        content |= {"truncation": None, "padding": None}
        names = self._names
        ids = {}
        for token in content["added_tokens"]:
            ids[names.get(token["content"], token["content"])] = token["id"]
            if token["content"] in names:
                token |= {"content": names[token["content"]], "normalized": False}
        model = content["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        try:
            self._renamed = Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # tokenizers has no errors of its own
            raise DataError(
                f"data.split_special_tokens: this tokenizer cannot encode special tokens as text ({error}); "
                "set it to false, or remove them from the rows"
            ) from error
        self._ids = {self._renamed.token_to_id(token): number for token, number in ids.items()}


def _without_tags(chat: Chat) -> list[Message]:
    """Return the messages with thoughts in a key: their tags are not text of the row, and may be special
    tokens."""
    split = ((message, parts_of(message)) for message in chat.messages)
    return [
        in_form(message, parts, THOUGHT_KEYS[0]) if parts and parts.thoughts.strip() else message
        for message, parts in split
    ]


def _all_text(value: Any) -> str:
    """Return all texts and keys of a value of JSON, separated by line breaks."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "\n".join(f"{key}\n{_all_text(item)}" for key, item in value.items())
    return "\n".join(map(_all_text, value)) if isinstance(value, list) else ""
