"""Rows of one source to tokenized samples: drawn by weight, rendered, tokenized in batches, and cut to
max_length.

The result depends on the rows and the request alone, so any process can do it for any chunk of rows.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flytune.data import left_out, missing_values, row_forms, unused_settings
from flytune.data.columns import NamedRow
from flytune.data.control_tokens import ControlTokens
from flytune.data.counts import Tally, count_tokens, ends_of
from flytune.data.formats import CHATS, RAW, Chat, Plain, Sample, Tokens
from flytune.data.image_rows import ImageReader, Picture
from flytune.data.labels import Encoded, encode, validated
from flytune.data.readers import Row
from flytune.data.render import ChatTemplate, Rendered, render
from flytune.data.rows import row_kind
from flytune.data.rows.base import Content, Label
from flytune.data.tokenizer import Encoder, require_chat_template
from flytune.errors import DataError
from flytune.models.scoring import IGNORED
from flytune.recipe import DataRequest, Source
from flytune.sentences import counted

Split = Literal["train", "heldout"]
_BATCH_CHARACTERS = 1_000_000
"""Characters of text that are tokenized at a time."""
LARGEST_ROW = 4_000_000
"""Characters of a row that is tokenized."""


class _Item(NamedTuple):
    """Content of a row."""

    texts: list[Rendered | Encoded]
    """The texts, or the tokens, of its samples."""
    where: str
    """Location of the row."""
    content: Content


class Chunk(NamedTuple):
    """Rows that follow each other in one source."""

    key: str
    """The recipe's key of the source."""
    rows: list[Row]
    form: str
    """Format of the source, if it is known from earlier rows; else empty. So is `kind`, as in Tally."""
    kind: str
    share: float
    """Share of the rows to be drawn."""
    again: bool
    """True if the rows were read before (a weight above 1): their errors are already counted."""


class StoredSample(NamedTuple):
    """A sample to be stored."""

    split: Split
    ids: Any
    """int32 [tokens]; so are the labels."""
    labels: Any
    digest: bytes | None
    """Hash of the sample; None unless data.deduplicate is set."""
    values: tuple[Any, ...]
    """Values of the columns of its kind of rows, beside input_ids and labels."""


@dataclass
class Samples:
    """The samples of a chunk."""

    tally: Tally
    rows: list[list[StoredSample]] = field(default_factory=list)
    """Samples of each row that has any: several where long ones are split."""
    bad: list[tuple[str, DataError]] = field(default_factory=list)
    """Location and error of each bad row."""


class Sampler:
    """Maker of the samples of one request."""

    def __init__(
        self,
        request: DataRequest,
        tokenizer: Encoder | None,
        heldout_below: int | None = None,
        out: Path | None = None,
    ) -> None:
        """Make one that holds out rows with numbers below `heldout_below`, by default a share of
        data.heldout_fraction, and stores images below the prepared data set `out`, if there is one.

        Without a tokenizer it only reads rows: `samples` raises the same errors of columns and their content,
        and is empty.
        """
        self._request, self._data, self._tokenizer = request, request.data, tokenizer
        self._heldout_below = self._data.heldout_fraction * 2**64 if heldout_below is None else heldout_below
        kind = row_kind(request.row_kind).bound(request)
        self._kind = kind if tokenizer is None else kind.with_end(tokenizer.added_end())
        self._images = ImageReader(request, out) if self._kind.has_images else None
        self._sources = request.data.all_read
        self._template: ChatTemplate | None = None
        self._controls: ControlTokens | None = None
        if request.data.system_prompt is not None and not request.data.system_prompt.strip():
            raise DataError("data.system_prompt: empty; remove it, or give a text")

    def samples(self, chunk: Chunk) -> Samples:
        """Return the samples of a chunk, with counts of its other rows.

        Raises:
            DataError: a row is bad and none may be; a row is too long and data.too_long is error; or there is
                no chat template.
        """
        samples = Samples(Tally(self._sources[chunk.key].name, form=chunk.form, kind=chunk.kind))
        per_row = self._kind.sequences
        if self._tokenizer is None:
            for _ in self._items(chunk, samples):
                pass
            return samples
        for batch in _batches(self._items(chunk, samples)):
            encoded = iter(self._encoded([text for item in batch for text in item.texts]))
            for item in batch:
                for label in item.content.labels:
                    sequences = self._kind.aligned(list(islice(encoded, per_row)), item.content.samples)
                    self._keep(sequences, label, item, chunk, samples)
        return samples

    def _keep(
        self, sequences: list[Encoded], label: Label, item: _Item, chunk: Chunk, samples: Samples
    ) -> None:
        """Add what is stored of the sequences of a row to the samples: nothing, one sample, or its pieces,
        which stay together."""
        data, tally = self._data, samples.tally
        longest = max(len(ids) for ids, _ in sequences)
        is_long = self._kind.is_long(sequences, data.max_length)
        if is_long and data.too_long == "error":
            raise DataError(
                f"{item.where}: {counted(longest, 'token')}, more than data.max_length {data.max_length}; "
                f"raise it, or set data.too_long to {self._kind.cuts}"
            )
        rows = self._kind.cut(sequences, data) if is_long else [sequences]
        trained = [row for row in rows if self._kind.is_trained(row)]
        stored = [self._stored(row, label, item.content) for row in trained]
        if self._is_heldout(chunk, item.content, stored, tally):
            stored = [sample._replace(split="heldout") for sample in stored]
        if chunk.again and (not stored or stored[0].split == "heldout"):
            return  # held-out samples are stored once
        tally.lengths[longest] += 1
        if not chunk.again:
            tally.truncated += is_long and bool(rows) and data.too_long == "truncate"
            tally.split += is_long and data.too_long == "split"
            tally.dropped_too_long += not rows
            tally.dropped_untrained += bool(rows) and not trained
            count_tokens(tally, sequences, [value for row in trained for value in row], item.where, data)
            for row in trained:
                tally.notes.update(self._kind.notes(row, item.content.samples, self._request))
        if stored:
            samples.rows.append(stored)

    def _stored(self, row: list[Encoded], label: Label, content: Content) -> StoredSample:
        """Return the sample of a row's sequences, one behind the other."""
        import numpy

        ids = numpy.asarray([token for tokens, _ in row for token in tokens], dtype="<i4")
        labels = numpy.asarray([number for _, numbers in row for number in numbers], dtype="<i4")
        values = self._kind.values([len(tokens) for tokens, _ in row], label, content.fields)
        images = values[0] if self._images else ""
        hashed = digest(ids, labels != IGNORED, label, images) if self._data.deduplicate else None
        return StoredSample("train", ids, labels, hashed, values)

    def _is_heldout(self, chunk: Chunk, content: Content, stored: list[StoredSample], tally: Tally) -> bool:
        """Return whether a row is held out: by its source, or by a number that follows from its content."""
        if self._data.heldout_key or not stored:
            return chunk.key == self._data.heldout_key
        number = self._split_number(self._identity(content, stored[0].ids))
        tally.split_range = ends_of([*tally.split_range, number])
        return number < self._heldout_below

    def _items(self, chunk: Chunk, samples: Samples) -> Iterator[_Item]:
        source, tally = self._sources[chunk.key], samples.tally
        for row, where in subsample(chunk.rows, chunk.share, self._data.seed):
            tally.rows += not chunk.again
            try:
                if isinstance(row, DataError):
                    raise row
                if not chunk.again:
                    tally.named.update(unused_settings.columns_of(row, source))
                if self._images is None:
                    _refuse_large(row, where)
                row = self._read(row, source, where, None if chunk.again else tally)
                row, pictures = self._images.read(row, source, where) if self._images else (row, [])
                if self._images is not None:
                    _refuse_large(row, where)
                named = NamedRow.of(row, source, where)
                form = tally.form or self._kind.form(named)
                item = self._item(named, form, tally, chunk.again, pictures)
            except _RequestError:
                raise
            except DataError as error:
                if not self._data.max_bad_fraction:
                    raise
                if not chunk.again:
                    tally.bad += 1
                    samples.bad.append((where, error))
                continue
            tally.form = form
            yield item

    def _read(self, row: dict[str, Any], source: Source, where: str, tally: Tally | None) -> dict[str, Any]:
        """Return the row in a form that its kind knows, without data.remove_columns, which are counted."""
        if removed := [name for name in source.remove_columns if name in row]:
            if tally:
                left_out.count(
                    (left_out.removed(name) for name in removed if left_out.has_content(row[name])),
                    tally.left_out,
                )
            row = {name: value for name, value in row.items() if name not in removed}
        return self._kind.known(row_forms.known(row, source.columns, where), source.columns)

    def _item(
        self, row: NamedRow, form: str, tally_so_far: Tally, again: bool, pictures: Sequence[Picture]
    ) -> _Item:
        """Return the content of a row; its counts are made where it is not read `again`."""
        tally, where = None if again else tally_so_far, row.where
        content = self._kind.content(row, form, self._data.system_prompt)
        samples = content.samples
        if self._images is not None:
            content = content._replace(fields=" ".join(picture.digest for picture in pictures))
            if not isinstance(samples[0], Chat):
                raise _RequestError(f"data.images: only chats ({', '.join(CHATS)}) can have images")
        variant = self._kind.variant(samples)
        if variant != (tally_so_far.kind or variant):
            raise DataError(
                f"{where}: the row is of {variant}, and the rows before it are of {tally_so_far.kind}: text "
                "gets no chat template, so one model would see two formats; write all rows as messages, or "
                "name two files in data.sources"
            )
        if not tally_so_far.form or variant != tally_so_far.kind:
            self._check_settings(f"{form} of {variant}" if variant else form, samples[0])
        before = tally.control_tokens if tally else 0
        texts = (
            [self._text(sample, form, where, tally) for sample in samples]
            if self._tokenizer is not None
            else []
        )
        if self._images is not None:
            for place, text in enumerate(texts):
                assert isinstance(text, Rendered)
                texts[place], counts = self._images.expanded(text, pictures, where)
                if tally:
                    tally.notes.update(counts)
        if tally:
            # A row is counted once.
            tally.control_tokens = min(tally.control_tokens, before + 1)
            _count_left_out(
                self._kind.unread(row), "" if self._kind.keeps_columns else form, samples, texts, tally
            )
            if word := missing_values.cell_of(row, samples):
                tally.missing += 1
                tally.first_missing = tally.first_missing or f"{where}: {word!r}"
            tally.contradicted += self._kind.contradicts_itself(row.values)
            tally.named[unused_settings.shape_of(samples[0])] += 1
            for text in texts:
                tally.thoughts.update(text.thoughts._asdict() if isinstance(text, Rendered) else {})
        tally_so_far.kind = variant
        return _Item(texts, where, content)

    def _text(self, sample: Sample, form: str, where: str, tally: Tally | None) -> Rendered | Encoded:
        if isinstance(sample, Tokens):
            assert self._tokenizer is not None
            return validated(sample, len(self._tokenizer), where, self._data.completion_only_loss)
        return self._rendered(sample, form, where, tally)

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
            trains_thoughts = self._data.train_on == "answers and thoughts"
            self._template = ChatTemplate(self._tokenizer, trains_thoughts, self._data.template_date)
        return self._template

    def _check_settings(self, form: str, sample: Sample) -> None:
        """Refuse settings that have no effect on rows of this format; with several sources, another one may
        use them."""
        data, chats, is_chat, is_raw = (
            self._data,
            ", ".join(CHATS),
            isinstance(sample, Chat),
            isinstance(sample, Plain),
        )
        if data.sources:
            return
        if data.system_prompt is not None and not is_chat:
            raise _RequestError(
                f"data.system_prompt: only chats ({chats}) can have one, and the data's format is {form}"
            )
        if data.train_on == "answers" and not is_chat:
            raise _RequestError(
                f"data.train_on: thoughts are found in chats ({chats}), and the data's format is {form}; "
                "remove it"
            )
        for name, changed in (
            ("add_bos_token", data.add_bos_token is not None),
            ("add_eos_token", not data.add_eos_token),
        ):
            if changed and not is_raw:
                raise _RequestError(
                    f"data.{name}: only for raw text ({', '.join(RAW)}), and the data's format is {form}; "
                    "remove it"
                    + ("; the chat template writes these tokens (data.chat_template)" if is_chat else "")
                )

    def _encoded(self, texts: list[Rendered | Encoded]) -> Iterator[Encoded]:
        """Tokenize the texts. All texts of a chunk are of one source, and so of one format; pairs may be text
        or messages."""
        rendered = [text for text in texts if isinstance(text, Rendered)]
        if not rendered:
            yield from (text for text in texts if not isinstance(text, Rendered))
        for _, alike in groupby(rendered, key=lambda text: text.add_special_tokens):
            data = self._data
            yield from encode(
                list(alike), self._tokenizer, data.add_bos_token, data.add_eos_token, self._controls
            )

    def _identity(self, content: Content, ids: Any) -> bytes:
        """Return what decides about a row's split: its prompt, where answers are compared; or its tokens; or
        its messages, where the template writes a date between them, so that the tokens are others each
        day."""
        if content.prompt:
            return content.prompt.encode()
        sample = content.samples[0]
        if isinstance(sample, Chat) and self._template is not None and self._template.has_date:
            content_of_sample = [sample.messages, sample.tools, *([content.fields] if self._images else [])]
            return json.dumps(content_of_sample, sort_keys=True, default=str).encode()
        return bytes(ids.tobytes()) + (content.fields.encode() if self._images else b"")

    def _split_number(self, content: bytes) -> int:
        """Return the 64 bits that decide about a row's split: a hash of its content (_identity), so that
        equal samples are in the same one."""
        hashed = hashlib.sha256(str(self._data.seed).encode() + b":" + content).digest()
        return int.from_bytes(hashed[:8], "big")


def _refuse_large(row: dict[str, Any], where: str) -> None:
    """Refuse a row before it is rendered: tokenizing 10 MB takes 2 GB of memory."""
    if (size := characters_of(row)) > LARGEST_ROW:
        raise DataError(
            f"{where}: a row of {size:,} characters, and at most {LARGEST_ROW:,} are tokenized; divide it "
            "into several"
        )


def characters_of(value: Any) -> int:
    """Return the characters of all texts in a value of JSON; a number counts as four."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(characters_of, value.values()))
    if isinstance(value, list):
        # Lists of numbers are tokens, or features that are not read.
        return (
            4 * len(value) if value and isinstance(value[0], int | float) else sum(map(characters_of, value))
        )
    return 1


def digest(ids: Any, labelled: Any, label: Label = None, images: str = "") -> bytes:
    """Return 16 bytes of a hash of a sample: of its tokens (int32), of which of them are trained (bool), of
    the label of a row that has one (equal rows with different labels are not equal samples), and of the
    hashes of its images."""
    content = ids.tobytes() + labelled.tobytes() + _bytes_of(label) + images.encode()
    return hashlib.sha256(content).digest()[:16]


def _count_left_out(
    row: NamedRow,
    form: str,
    samples: Sequence[Sample],
    texts: Sequence[Rendered | Encoded],
    tally: Tally,
) -> None:
    """Count what no sample has; without a `form` keys of messages alone."""
    text = "\n".join(text.text for text in texts if isinstance(text, Rendered))
    chats = [sample for sample in samples if isinstance(sample, Chat)]
    names = left_out.names(row, form, samples, text) if form else left_out.of_messages(chats, text)
    left_out.count(names, tally.left_out)


def _bytes_of(label: Label) -> bytes:
    if isinstance(label, tuple):
        return repr(label).encode()
    return b"" if label is None else bytes([label])


class _RequestError(DataError):
    """An error of the request, not of a row."""


def subsample(rows: Iterable[Row], share: float, seed: int) -> Iterator[Row]:
    """Yield a share of the rows, drawn by a hash of their content: the same in any order, and a smaller share
    is part of any larger one."""
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
