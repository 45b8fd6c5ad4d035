"""Preparing: rows in, tokenized shards with a manifest out; once, on a CPU, so that no GPU ever waits for it."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from flytune.data import contract
from flytune.data.formats import choose, convert
from flytune.data.reading import Row, read, read_path
from flytune.data.rendering import ChatTemplate, Rendered, render
from flytune.data.shards import MANIFEST, SplitWriter
from flytune.data.tokenizer import load_tokenizer, require_chat_template
from flytune.data.tokenizing import IGNORED, Encoded, encode
from flytune.errors import DataError
from flytune.recipe import DataRequest
from flytune.records import Bin, Manifest, SplitCounts
from flytune.sections import Data

logger = logging.getLogger(__name__)
_BATCH_SAMPLES = 1000
_BATCH_CHARACTERS = 1_000_000
_BINS = 12
Split = Literal["train", "heldout"]


class Tally:
    """What happened to the rows so far."""

    def __init__(self) -> None:
        self.form = ""
        self.rows = self.truncated = self.dropped_too_long = self.dropped_untrained = 0
        self.lengths: Counter[int] = Counter()
        """Tokens of a row before any cut, to rows of that length."""


def prepare(request: DataRequest, out: Path) -> Manifest:
    """Reads, renders, tokenizes and splits the data of `request` into the new or empty folder `out`.

    Writes train/*.parquet and heldout/*.parquet (columns input_ids and labels, lists of int32), tokenizer/, contract.json, and
    manifest.json last. With data.packing a row of train is a block of samples, and a column seq_lengths says how long each is;
    held-out samples are never packed, for they are scored one by one. Equal requests give equal bytes. Memory does not grow
    with the data (but see reading.read).

    Raises:
        DataError: whatever about the data or the tokenizer the run could not work with.
    """
    data, tally = request.data, Tally()
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out}: not empty; prepared data needs a folder of its own")
    tokenizer = load_tokenizer(request.model, data)
    counts: dict[Split, SplitCounts] = {}
    with ExitStack() as open_writers:
        writers: dict[Split, SplitWriter] = {
            "train": open_writers.enter_context(SplitWriter(out, "train", data.max_length if data.packing else None)),
            "heldout": open_writers.enter_context(SplitWriter(out, "heldout")),
        }
        for split, sample in _samples(request, tokenizer, tally):
            writers[split].add(sample)
        counts = {split: writer.counts() for split, writer in writers.items()}
    _refuse_empty(data, counts, tally)
    tokenizer.save_pretrained(out / "tokenizer")
    manifest = _manifest(data, counts, tally, out)
    contract.hold(out, manifest, data, tokenizer)
    partial = out / f"{MANIFEST}.partial"
    manifest.write(partial)
    partial.replace(out / MANIFEST)
    logger.info("prepared %d rows: %d train, %d held-out samples", tally.rows, manifest.train.samples, manifest.heldout.samples)
    if manifest.train.blocks is not None:
        logger.info("packed into %d blocks, %.2f %% of them samples", manifest.train.blocks, 100 * manifest.useful_share)
    return manifest


def _samples(request: DataRequest, tokenizer: Any, tally: Tally) -> Iterator[tuple[Split, Encoded]]:
    """All samples that are kept, each with its split, in order."""
    data = request.data
    rendered = _rendered(request, read(data), tokenizer, tally)
    bar = tqdm(desc="prepare", unit=" rows", delay=2)
    with bar:
        for sample in _tokenized(rendered, data, tokenizer, tally, bar):
            yield ("train" if data.heldout_path else _split(sample, data)), sample
        if data.heldout_path:
            rows = read_path(data.heldout_path, "data.heldout_path", data)
            for sample in _tokenized(_rendered(request, rows, tokenizer, tally), data, tokenizer, tally, bar):
                yield "heldout", sample


def _rendered(request: DataRequest, rows: Iterator[Row], tokenizer: Any, tally: Tally) -> Iterator[tuple[Rendered, str]]:
    """Each row's text, and where the row stands."""
    data = request.data
    first = next(rows, None)
    if first is None:
        return
    if not tally.form:
        tally.form = choose(first[0], data.format, data.columns, first[1])
    template = None
    if tally.form in ("messages", "instruction"):
        require_chat_template(tokenizer, request.model, tally.form)
        template = ChatTemplate(tokenizer)
    for row, where in chain([first], rows):
        sample = convert(row, tally.form, data.columns, where)
        yield render(sample, template, data.completion_only_loss, where), where


def _tokenized(
    rendered: Iterable[tuple[Rendered, str]], data: Data, tokenizer: Any, tally: Tally, bar: "tqdm[Any]"
) -> Iterator[Encoded]:
    """The samples that are kept, cut to max_length; what happens to the others is tallied."""
    for batch in _batches(rendered):
        tally.rows += len(batch)
        for (ids, labels), (_, where) in zip(encode([text for text, _ in batch], tokenizer), batch, strict=True):
            tally.lengths[len(ids)] += 1
            if len(ids) > data.max_length:
                if data.too_long == "error":
                    raise DataError(
                        f"{where}: {len(ids)} tokens, more than data.max_length {data.max_length}; "
                        "raise it, or set data.too_long to truncate or drop"
                    )
                if data.too_long == "drop":
                    tally.dropped_too_long += 1
                    continue
                ids, labels = ids[: data.max_length], labels[: data.max_length]
                tally.truncated += 1
            if labels.count(IGNORED) == len(labels):
                tally.dropped_untrained += 1
                continue
            yield ids, labels
        bar.update(len(batch))


def _batches(rendered: Iterable[tuple[Rendered, str]]) -> Iterator[list[tuple[Rendered, str]]]:
    batch: list[tuple[Rendered, str]] = []
    characters = 0
    for item in rendered:
        batch.append(item)
        characters += len(item[0].text)
        if len(batch) >= _BATCH_SAMPLES or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _split(sample: Encoded, data: Data) -> Split:
    """By the tokens as they are stored, so that equal samples never stand on both sides."""
    import numpy

    content = numpy.asarray(sample[0], dtype="<i4").tobytes()
    digest = hashlib.sha256(str(data.seed).encode() + b":" + content).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < data.heldout_fraction * 2**64 else "train"


def _refuse_empty(data: Data, counts: dict[Split, SplitCounts], tally: Tally) -> None:
    source = data.dataset_name or data.path
    kept = counts["train"].samples + counts["heldout"].samples
    if not tally.rows:
        raise DataError(f"{source}: empty, not one row was found")
    if not kept:
        raise DataError(
            f"{source}: none of {tally.rows} rows is left: {tally.dropped_too_long} are longer than data.max_length "
            f"{data.max_length}, {tally.dropped_untrained} have no trained token within it (no answer, or an empty or cut one)"
        )
    names: dict[Split, str] = {"train": "training", "heldout": "held-out"}
    for split, name in names.items():
        if counts[split].samples:
            continue
        if data.heldout_path:
            where = data.heldout_path if split == "heldout" else source
            raise DataError(
                f"{where}: no {name} sample is left of it; {tally.dropped_too_long} were too long, "
                f"{tally.dropped_untrained} without a trained token"
            )
        raise DataError(
            f"{source}: no {name} sample: {kept} samples, shared out by content at data.heldout_fraction "
            f"{data.heldout_fraction}; give more data, change the fraction, or name data.heldout_path"
        )


def _manifest(data: Data, counts: dict[Split, SplitCounts], tally: Tally, out: Path) -> Manifest:
    tokenizer, content = hashlib.sha256(), hashlib.sha256()
    for file in sorted(path for path in (out / "tokenizer").rglob("*") if path.is_file()):
        tokenizer.update(f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    for shard in (shard for split in counts.values() for shard in split.shards):
        content.update(f"{shard.file}:{shard.sha256}\n".encode())
    return Manifest(
        source=str(data.dataset_name or data.path),
        format=tally.form,
        rows=tally.rows,
        truncated=tally.truncated,
        dropped_too_long=tally.dropped_too_long,
        dropped_untrained=tally.dropped_untrained,
        max_length=data.max_length,
        longest=max(tally.lengths),
        tokens_read=sum(length * rows for length, rows in tally.lengths.items()),
        histogram=_histogram(tally.lengths),
        train=counts["train"],
        heldout=counts["heldout"],
        tokenizer_sha256=tokenizer.hexdigest(),
        content_sha256=content.hexdigest(),
    )


def _histogram(lengths: Counter[int]) -> list[Bin]:
    """Bins of equal width from the shortest row to the longest; no more than _BINS."""
    shortest, longest = min(lengths), max(lengths)
    width = -(-(longest + 1 - shortest) // _BINS)
    bins: Counter[int] = Counter()
    for length, rows in lengths.items():
        bins[(length - shortest) // width] += rows
    lows = range(shortest, longest + 1, width)
    return [Bin(low=low, high=low + width, samples=bins[number]) for number, low in enumerate(lows)]
