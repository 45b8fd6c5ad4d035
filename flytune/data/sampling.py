"""The rows of one source to tokenized samples: drawn by weight, rendered, tokenized in batches, and cut to max_length."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

from flytune.data.bad_rows import BadRows
from flytune.data.formats import CHATS, Tokens, check_columns, choose, convert
from flytune.data.reading import Row, strict
from flytune.data.rendering import ChatTemplate, Rendered, render
from flytune.data.tokenizer import require_chat_template
from flytune.data.tokenizing import IGNORED, Encoded, checked, encode
from flytune.errors import DataError
from flytune.recipe import DataRequest
from flytune.sections import Source

_BATCH_SAMPLES = 1000
_BATCH_CHARACTERS = 1_000_000
_Text = tuple[Rendered | Encoded, str]
"""What a row says, as text or as tokens, and where it stands."""


class Tally:
    """What happened to the rows of one source so far."""

    def __init__(self, name: str, weight: float = 1.0) -> None:
        self.name, self.weight, self.form = name, weight, ""
        self.rows = self.bad = self.truncated = self.split = self.dropped_too_long = self.dropped_untrained = 0
        """Rows, each once; the last four also once for each time a weight repeats them."""
        self.duplicates = 0
        """Samples left out by data.deduplicate."""
        self.samples = self.tokens = self.trained_tokens = 0
        """Kept."""
        self.lengths: Counter[int] = Counter()
        """Tokens of a row before any cut, to rows of that length."""

    def keep(self, sample: Encoded) -> None:
        """One more sample that is stored."""
        self.samples += 1
        self.tokens += len(sample[0])
        self.trained_tokens += len(sample[1]) - sample[1].count(IGNORED)


class Sampler:
    """Makes samples as one request asks for."""

    def __init__(self, request: DataRequest, tokenizer: Any, bad: BadRows, bar: "tqdm[Any]") -> None:
        self._request, self._data, self._tokenizer, self._bad, self._bar = request, request.data, tokenizer, bad, bar
        self._template: ChatTemplate | None = None
        self._rows = 0
        if request.data.system_prompt is not None and not request.data.system_prompt.strip():
            raise DataError("data.system_prompt: empty; leave it out, or say what the system says")

    def samples(
        self, rows: Iterator[Row], source: Source, key: str, tally: Tally, again: bool = False
    ) -> Iterator[list[Encoded]]:
        """What each row gives: a sample, several where long ones are split, never none; what happens to others is tallied.

        `key` is the recipe's key for the source. `again`: these rows were read before, and their bad ones are known.

        Raises:
            DataError: a bad row, where none is allowed; a row too long, where the recipe says so; no chat template.
        """
        check_columns(source.columns, key)
        for batch in _batches(self._texts(rows if self._bad.fraction else strict(rows), source, tally, again)):
            for sample, (_, where) in zip(self._encoded([text for text, _ in batch]), batch, strict=True):
                tally.lengths[len(sample[0])] += 1
                pieces = self._cut(sample, where, tally)
                if trained := [piece for piece in pieces if piece[1].count(IGNORED) < len(piece[1])]:
                    yield trained
                elif pieces:
                    tally.dropped_untrained += 1
            self._bar.update(len(batch))

    def _texts(self, rows: Iterator[Row], source: Source, tally: Tally, again: bool) -> Iterator[_Text]:
        for row, where in rows:
            self._rows, tally.rows = self._rows + (not again), tally.rows + (not again)
            try:
                if isinstance(row, DataError):
                    raise row
                form = tally.form or choose(row, source.format, source.columns, where)
                sample = convert(row, form, source.columns, where, self._data.system_prompt)
                if isinstance(sample, Tokens):
                    text: Rendered | Encoded = checked(sample, len(self._tokenizer), where)
                else:
                    text = render(sample, self._chat_template(form), self._data.completion_only_loss, where)
            except _Refused:
                raise
            except DataError as error:
                if not again:
                    tally.bad += 1
                    self._bad.add(where, error)
                    self._bad.check(self._rows, done=False)
                continue
            tally.form = form
            yield text, where

    def _chat_template(self, form: str) -> ChatTemplate | None:
        if form not in CHATS:
            if self._data.system_prompt is not None and not self._data.sources:
                raise _Refused(f"data.system_prompt: only chats take one ({', '.join(CHATS)}), and the data's format is {form}")
            return None
        if self._template is None:
            try:
                require_chat_template(self._tokenizer, self._request.model, form)
            except DataError as error:
                raise _Refused(str(error)) from None
            self._template = ChatTemplate(self._tokenizer)
        return self._template

    def _encoded(self, texts: list[Rendered | Encoded]) -> Iterable[Encoded]:
        """All texts of a batch are of one source, and so of one format."""
        rendered = [text for text in texts if isinstance(text, Rendered)]
        return encode(rendered, self._tokenizer) if rendered else [text for text in texts if not isinstance(text, Rendered)]

    def _cut(self, sample: Encoded, where: str, tally: Tally) -> list[Encoded]:
        """The sample as it fits into max_length; nothing where it is dropped."""
        max_length, (ids, labels) = self._data.max_length, sample
        if len(ids) <= max_length:
            return [sample]
        if self._data.too_long == "error":
            raise DataError(
                f"{where}: {len(ids)} tokens, more than data.max_length {max_length}; "
                "raise it, or set data.too_long to truncate, split or drop"
            )
        if self._data.too_long == "drop":
            tally.dropped_too_long += 1
            return []
        if self._data.too_long == "truncate":
            tally.truncated += 1
            return [(ids[:max_length], labels[:max_length])]
        tally.split += 1
        return list(split(sample, max_length))


class _Refused(DataError):
    """No row's fault."""


def drawn(rows: Iterator[Row], share: float, seed: int) -> Iterator[Row]:
    """The share of the rows that their content draws: the same in any order, the smaller one always part of the larger."""
    if share >= 1:
        yield from rows
    for row, where in rows:
        content = json.dumps(row, sort_keys=True, default=str) if isinstance(row, dict) else where
        digest = hashlib.sha256(f"{seed}:weight:{content}".encode()).digest()
        if int.from_bytes(digest[:8], "big") < share * 2**64:
            yield row, where


def shares(weight: float) -> list[float]:
    """2.5 as [1, 1, 0.5]: how much is drawn each time that the source is read."""
    return [1.0] * int(weight) + [weight % 1] * (weight > int(weight))


def split(sample: Encoded, max_length: int) -> Iterator[Encoded]:
    """Pieces of max_length tokens at most that follow each other.

    A piece ends behind the last answer that ends in it. Where none does (plain text, or an answer longer than max_length) it
    is full, and its last token comes again as the first of the next one, as context: the first token of a piece has nothing
    before it that could predict it, and is never trained. So each trained token is trained once.
    """
    ids, labels = sample
    start = 0
    while len(ids) - start > max(max_length, 1):
        end = start + max_length
        border = next((at for at in range(end, start, -1) if labels[at] == IGNORED != labels[at - 1]), None)
        yield _piece(sample, start, border or end)
        start = border or max(end - 1, start + 1)
    yield _piece(sample, start, len(ids))


def _piece(sample: Encoded, start: int, end: int) -> Encoded:
    return sample[0][start:end], [IGNORED, *sample[1][start + 1 : end]]


def _batches(texts: Iterable[_Text]) -> Iterator[list[_Text]]:
    batch: list[_Text] = []
    characters = 0
    for item in texts:
        batch.append(item)
        characters += len(item[0].text if isinstance(item[0], Rendered) else item[0][0])
        if len(batch) >= _BATCH_SAMPLES or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
