"""Rows of one source to tokenized samples: drawn by weight, rendered, tokenized in batches, and cut to max_length.

The result depends on the rows and the request alone, so any process can do it for any chunk of rows.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, NamedTuple

from flytune.data.control_tokens import ControlTokens
from flytune.data.counts import Tally
from flytune.data.formats import CHATS, RAW, Chat, Plain, Tokens, choose, convert
from flytune.data.labels import Encoded, encode, validated
from flytune.data.pairs import PREFERENCE, Pair, cut, pair_of
from flytune.data.readers import Row
from flytune.data.render import ChatTemplate, Rendered, render
from flytune.data.tokenizer import Encoder, require_chat_template
from flytune.data.unpaired import UNPAIRED, labelled_of
from flytune.errors import DataError
from flytune.models.scoring import IGNORED
from flytune.recipe import DataRequest, Source

_BATCH_CHARACTERS = 1_000_000
"""Characters of text that are tokenized at a time."""
LARGEST_ROW = 4_000_000
"""Characters of a row that is tokenized."""


class _Item(NamedTuple):
    """Content of a row."""

    texts: list[Rendered | Encoded]
    """One text, or its tokens; of a pair, the texts with the chosen and with the rejected answer."""
    where: str
    """Location of the row."""
    prompt: str = ""
    """Identity of the prompt of a pair, or of labelled answers."""
    answer_labels: Sequence[bool | None] = (None,)
    """Label of each text, where the answers have labels."""


class Chunk(NamedTuple):
    """Rows that follow each other in one source."""

    key: str
    """The recipe's key of the source."""
    rows: list[Row]
    form: str
    """Format of the source, if it is known from earlier rows; else empty."""
    share: float
    """Share of the rows to be drawn."""
    again: bool
    """True if the rows were read before (a weight above 1): their errors are already counted."""


@dataclass
class Samples:
    """The samples of a chunk, one after the other."""

    tally: Tally
    ids: Any
    """int32 [tokens]."""
    labels: Any
    """int32 [tokens]."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each sample."""
    trained: list[int] = field(default_factory=list)
    """Trained tokens of each sample."""
    pieces: list[int] = field(default_factory=list)
    """Samples of each row that has any: several where long ones are split."""
    heldout: list[bool] = field(default_factory=list)
    """True for each row in `pieces` whose samples are held out."""
    chosen: list[int] = field(default_factory=list)
    """Tokens of the chosen sequence of each pair, which the rejected one follows; empty for other rows."""
    answer_labels: list[bool] = field(default_factory=list)
    """Label of each sample; empty for answers without labels."""
    digests: list[bytes] = field(default_factory=list)
    """Hash of each sample; empty unless data.deduplicate is set."""
    bad: list[tuple[str, DataError]] = field(default_factory=list)
    """Location and error of each bad row."""


class Sampler:
    """Maker of the samples of one request."""

    def __init__(self, request: DataRequest, tokenizer: Encoder) -> None:
        self._request, self._data, self._tokenizer = request, request.data, tokenizer
        self._sources: dict[str, Source] = dict(request.data.all_sources)
        if request.data.heldout_key:
            self._sources[request.data.heldout_key] = request.data
        self._template: ChatTemplate | None = None
        self._controls: ControlTokens | None = None
        if request.data.system_prompt is not None and not request.data.system_prompt.strip():
            raise DataError("data.system_prompt: empty; remove it, or give a text")

    def samples(self, chunk: Chunk) -> Samples:
        """Return the samples of a chunk, with counts of its other rows.

        Raises:
            DataError: a row is bad and none may be; a row is too long and data.too_long is error; or there is no chat template.
        """
        import numpy

        source = self._sources[chunk.key]
        none = numpy.zeros(0, numpy.int32)
        made = Samples(Tally(source.name, form=chunk.form), none, none)
        kept: list[tuple[Any, Any]] = []
        for batch in _batches(self._items(chunk, made)):
            encoded = iter(self._encoded([text for item in batch for text in item.texts]))
            for item in batch:
                sequences = list(islice(encoded, len(item.texts)))
                if self._request.pairs:
                    kept += self._kept_pair(sequences, item, chunk, made)
                    continue
                for sequence, label in zip(sequences, item.answer_labels, strict=True):
                    pieces = self._kept(sequence, item, chunk, made)
                    made.answer_labels += [] if label is None else [label] * len(pieces)
                    kept += pieces
        if kept:
            made.ids, made.labels = (numpy.concatenate([one[place] for one in kept]) for place in (0, 1))
            made.lengths = [len(ids) for ids, _ in kept]
            starts = numpy.cumsum([0, *made.lengths[:-1]])
            made.trained = numpy.add.reduceat(made.labels != IGNORED, starts, dtype=numpy.int64).tolist()
        if self._data.deduplicate:
            made.digests = [digest(ids, labels != IGNORED) for ids, labels in kept]
        return made

    def _kept(self, sample: Encoded, item: _Item, chunk: Chunk, made: Samples) -> list[tuple[Any, Any]]:
        """Return the stored samples of one text, as int32 arrays: none, the sample, or its pieces, which stay together."""
        import numpy

        pieces, tally = self._cut(sample, item.where), made.tally
        trained = [
            (numpy.asarray(ids, dtype="<i4"), numpy.asarray(labels, dtype="<i4"))
            for ids, labels in pieces
            if labels.count(IGNORED) < len(labels)
        ]
        is_heldout = bool(trained) and self._is_heldout(item.prompt.encode() or trained[0][0].tobytes(), chunk.key)
        if chunk.again and (is_heldout or not trained):
            return []  # held-out samples are stored once
        tally.lengths[len(sample[0])] += 1
        if not chunk.again:
            is_cut = len(sample[0]) > self._data.max_length
            tally.truncated += is_cut and self._data.too_long == "truncate"
            tally.split += is_cut and self._data.too_long == "split"
            tally.dropped_too_long += not pieces
            tally.dropped_untrained += bool(pieces) and not trained
        if trained:
            made.pieces.append(len(trained))
            made.heldout.append(is_heldout)
        return trained

    def _kept_pair(self, sequences: list[Encoded], item: _Item, chunk: Chunk, made: Samples) -> list[tuple[Any, Any]]:
        """Return the stored form of a pair, the chosen sequence and then the rejected one; none if it is dropped."""
        import numpy

        longest, most, tally = max(len(ids) for ids, _ in sequences), self._data.max_length, made.tally
        is_long = longest > most
        if is_long and self._data.too_long == "error":
            self._cut(max(sequences, key=lambda one: len(one[0])), item.where)
        is_dropped = is_long and self._data.too_long == "drop"
        pair = None if is_dropped else cut(sequences[0], sequences[1], most)
        is_heldout = pair is not None and self._is_heldout(item.prompt.encode(), chunk.key)
        if chunk.again and (is_heldout or pair is None):
            return []  # held-out pairs are stored once
        tally.lengths[longest] += 1
        if not chunk.again:
            tally.truncated += is_long and not is_dropped
            tally.dropped_too_long += is_dropped
            tally.dropped_untrained += not is_dropped and pair is None
        if pair is None:
            return []
        made.pieces.append(1)
        made.heldout.append(is_heldout)
        made.chosen.append(len(pair[0][0]))
        ids, labels = (numpy.asarray(pair[0][place] + pair[1][place], dtype="<i4") for place in (0, 1))
        return [(ids, labels)]

    def _items(self, chunk: Chunk, made: Samples) -> Iterator[_Item]:
        source, tally = self._sources[chunk.key], made.tally
        for row, where in subsample(chunk.rows, chunk.share, self._data.seed):
            tally.rows += not chunk.again
            try:
                if isinstance(row, DataError):
                    raise row
                _refuse_large(row, where)
                if self._request.pairs or self._request.labels:
                    form = PREFERENCE if self._request.pairs else UNPAIRED
                    item = self._answers(row, form, source, where, None if chunk.again else tally)
                else:
                    form = tally.form or choose(row, source.format, source.columns, where)
                    if not tally.form:
                        self._check_settings(form, form in CHATS, form in RAW)
                    item = _Item([self._text(row, form, source, where, None if chunk.again else tally)], where)
            except _RequestError:
                raise
            except DataError as error:
                if not self._data.max_bad_fraction:
                    raise
                if not chunk.again:
                    tally.bad += 1
                    made.bad.append((where, error))
                continue
            tally.form = form
            yield item

    def _text(self, row: dict[str, Any], form: str, source: Source, where: str, tally: Tally | None) -> Rendered | Encoded:
        sample = convert(row, form, source.columns, where, self._data.system_prompt)
        if isinstance(sample, Tokens):
            return validated(sample, len(self._tokenizer), where, self._data.completion_only_loss)
        return self._rendered(sample, form, where, tally)

    def _answers(self, row: dict[str, Any], form: str, source: Source, where: str, tally: Tally | None) -> _Item:
        """Return both answers of a pair, or those with a label."""
        if form == PREFERENCE:
            pair: Pair = pair_of(row, source.columns, where, self._data.system_prompt)
            samples, prompt, labels = [pair.chosen, pair.rejected], pair.prompt, list[bool]()
        else:
            found = labelled_of(row, source.format, source.columns, where, self._data.system_prompt)
            samples, prompt, labels = found.samples, found.prompt, found.labels
        is_chat = isinstance(samples[0], Chat)
        self._check_settings(form + (" of messages" if is_chat else " of text"), is_chat, not is_chat)
        before = tally.control_tokens if tally else 0
        texts = [self._rendered(sample, form, where, tally) for sample in samples]
        if tally:
            # A row is counted once.
            tally.control_tokens = min(tally.control_tokens, before + 1)
        return _Item([*texts], where, prompt, labels)

    def _rendered(self, sample: Chat | Plain, form: str, where: str, tally: Tally | None) -> Rendered:
        """Return the text of a sample; `tally` counts the rows with control tokens."""
        template, completion_only = self._chat_template(sample, form), self._data.completion_only_loss
        if self._controls is None or (template is not None and not self._controls.has_template):
            self._controls = ControlTokens(self._tokenizer, template)
        if not self._controls.are_in(sample):
            return render(sample, template, completion_only, where)
        if tally is not None:
            tally.control_tokens += 1
        if self._data.split_special_tokens is False:
            return render(sample, template, completion_only, where)
        return self._controls.render_as_text(sample, template, completion_only, where)

    def _chat_template(self, sample: Chat | Plain, form: str) -> ChatTemplate | None:
        if isinstance(sample, Plain):
            return None
        if self._template is None:
            try:
                require_chat_template(self._tokenizer, self._request.model, form)
            except DataError as error:
                raise _RequestError(str(error)) from None
            self._template = ChatTemplate(self._tokenizer)
        return self._template

    def _check_settings(self, form: str, is_chat: bool, is_raw: bool) -> None:
        """Refuse settings that have no effect on rows of this format; with several sources, another one may use them."""
        data, chats = self._data, ", ".join(CHATS)
        if data.sources:
            return
        if data.system_prompt is not None and not is_chat:
            raise _RequestError(f"data.system_prompt: only chats ({chats}) can have one, and the data's format is {form}")
        for name, changed in (("add_bos_token", data.add_bos_token is not None), ("add_eos_token", not data.add_eos_token)):
            if changed and not is_raw:
                raise _RequestError(
                    f"data.{name}: only for raw text ({', '.join(RAW)}), and the data's format is {form}; remove it"
                    + ("; the chat template writes these tokens (data.chat_template)" if is_chat else "")
                )

    def _encoded(self, texts: list[Rendered | Encoded]) -> Iterator[Encoded]:
        """Tokenize the texts. All texts of a chunk are of one source, and so of one format; pairs may be text or messages."""
        rendered = [text for text in texts if isinstance(text, Rendered)]
        if not rendered:
            yield from (text for text in texts if not isinstance(text, Rendered))
        for _, alike in groupby(rendered, key=lambda text: text.add_special_tokens):
            data = self._data
            yield from encode(list(alike), self._tokenizer, data.add_bos_token, data.add_eos_token, self._controls)

    def _cut(self, sample: Encoded, where: str) -> list[Encoded]:
        """Return the sample in pieces of at most max_length tokens; none if it is dropped."""
        max_length, (ids, labels) = self._data.max_length, sample
        if len(ids) <= max_length:
            return [sample]
        if self._data.too_long == "error":
            form = self._request.pairs or self._request.labels
            raise DataError(
                f"{where}: {len(ids)} tokens, more than data.max_length {max_length}; "
                f"raise it, or set data.too_long to truncate{', split or' if not form else ' or'} drop"
            )
        if self._data.too_long == "drop":
            return []
        return (
            [(ids[:max_length], labels[:max_length])] if self._data.too_long == "truncate" else list(split(sample, max_length))
        )

    def _is_heldout(self, content: bytes, key: str) -> bool:
        """Decide by a hash of the stored tokens, so that equal samples are in the same split; of answers to compare, of
        their prompt."""
        if self._data.heldout_key:
            return key == self._data.heldout_key
        hashed = hashlib.sha256(str(self._data.seed).encode() + b":" + content).digest()
        return int.from_bytes(hashed[:8], "big") < self._data.heldout_fraction * 2**64


def _refuse_large(row: dict[str, Any], where: str) -> None:
    """Refuse a row before it is rendered: tokenizing 10 MB takes 2 GB of memory."""
    if (size := _size(row)) > LARGEST_ROW:
        raise DataError(
            f"{where}: a row of {size:,} characters, and at most {LARGEST_ROW:,} are tokenized; divide it into several"
        )


def _size(value: Any) -> int:
    """Return the characters of all texts in a value of JSON; a number counts as four."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list):
        # Lists of numbers are tokens, or features that are not read.
        return 4 * len(value) if value and isinstance(value[0], int | float) else sum(map(_size, value))
    return 1


def digest(ids: Any, labelled: Any) -> bytes:
    """Return 16 bytes of a hash of a sample: of its tokens (int32), and of which of them are trained (bool)."""
    return hashlib.sha256(ids.tobytes() + labelled.tobytes()).digest()[:16]


class _RequestError(DataError):
    """An error of the request, not of a row."""


def subsample(rows: Iterable[Row], share: float, seed: int) -> Iterator[Row]:
    """Yield a share of the rows, drawn by a hash of their content: the same in any order, and a smaller share is part of
    any larger one."""
    if share >= 1:
        yield from rows
        return
    for row, where in rows:
        content = json.dumps(row, sort_keys=True, default=str) if isinstance(row, dict) else where
        hashed = hashlib.sha256(f"{seed}:weight:{content}".encode()).digest()
        if int.from_bytes(hashed[:8], "big") < share * 2**64:
            yield row, where


def shares(weight: float) -> list[float]:
    """Return the share that is drawn in each pass over a source: [1, 1, 0.5] for a weight of 2.5."""
    return [1.0] * int(weight) + [weight % 1] * (weight > int(weight))


def split(sample: Encoded, max_length: int) -> Iterator[Encoded]:
    """Yield consecutive pieces of at most max_length tokens.

    A piece ends after the last answer that ends in it. If none does (plain text, or an answer longer than max_length), it is
    full, and its last token is repeated as the first of the next piece, as context: the first token of a piece is never
    trained, because no token precedes it that could predict it. So each trained token is trained once.
    """
    ids, labels = sample
    start = 0
    while len(ids) - start > max(max_length, 1):
        end = start + max_length
        boundary = next((at for at in range(end, start, -1) if labels[at] == IGNORED != labels[at - 1]), None)
        yield _piece(sample, start, boundary or end)
        start = boundary or max(end - 1, start + 1)
    yield _piece(sample, start, len(ids))


def _piece(sample: Encoded, start: int, end: int) -> Encoded:
    return sample[0][start:end], [IGNORED, *sample[1][start + 1 : end]]


def _batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += sum(len(text.text if isinstance(text, Rendered) else text[0]) for text in item.texts)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
