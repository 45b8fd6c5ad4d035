"""Preparing: rows in, tokenized shards with a manifest out; once, on a CPU, so that no GPU ever waits for it."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from flytune.data import contract
from flytune.data.bad_rows import BadRows
from flytune.data.reading import read, read_path
from flytune.data.sampling import Sampler, Tally, drawn, shares
from flytune.data.shards import MANIFEST, SplitWriter
from flytune.data.tokenizer import load_tokenizer
from flytune.data.tokenizing import IGNORED, Encoded
from flytune.errors import DataError
from flytune.recipe import DataRequest
from flytune.records import Bin, Manifest, SourceCounts, SplitCounts
from flytune.sections import Data, WeightedSource

logger = logging.getLogger(__name__)
_BINS = 12
Split = Literal["train", "heldout"]


def prepare(request: DataRequest, out: Path) -> Manifest:
    """Reads, renders, tokenizes and splits the data of `request` into the new or empty folder `out`.

    Writes train/*.parquet and heldout/*.parquet (columns input_ids and labels, lists of int32), tokenizer/, bad_rows.jsonl
    where rows were set aside, contract.json, and manifest.json last. With data.packing a row of train is a block of samples,
    and a column seq_lengths says how long each is; held-out samples are never packed, for they are scored one by one. Equal
    requests give equal bytes. Memory does not grow with the data (but see reading.read).

    Raises:
        DataError: whatever about the data or the tokenizer the run could not work with.
    """
    data = request.data
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out}: not empty; prepared data needs a folder of its own")
    tokenizer = load_tokenizer(request.model, data)
    counts: dict[Split, SplitCounts] = {}
    with ExitStack() as opened:
        writers: dict[Split, SplitWriter] = {
            "train": opened.enter_context(SplitWriter(out, "train", data.max_length if data.packing else None)),
            "heldout": opened.enter_context(SplitWriter(out, "heldout")),
        }
        bad = opened.enter_context(BadRows(out, data.max_bad_fraction).opened())
        bar = opened.enter_context(tqdm(desc="prepare", unit=" rows", delay=2))
        tallies = _tallies(data)
        seen: set[bytes] = set()
        for split, sample, tally in _samples(data, Sampler(request, tokenizer, bad, bar), tallies):
            if data.deduplicate and not _is_new(sample, seen):
                tally.duplicates += 1
                continue
            writers[split].add(sample)
            tally.keep(sample)
        counts = {split: writer.counts() for split, writer in writers.items()}
        bad.check(sum(tally.rows for tally in tallies.values()))
    _refuse_empty(data, counts, list(tallies.values()))
    tokenizer.save_pretrained(out / "tokenizer")
    manifest = _manifest(data, counts, list(tallies.values()), out)
    contract.hold(out, manifest, data, tokenizer)
    partial = out / f"{MANIFEST}.partial"
    manifest.write(partial)
    partial.replace(out / MANIFEST)
    train, heldout = manifest.train, manifest.heldout
    logger.info("prepared %d rows: %d train, %d held-out samples", manifest.rows, train.samples, heldout.samples)
    if train.blocks is not None:
        logger.info("packed into %d blocks, %.2f %% of them samples", train.blocks, 100 * manifest.useful_share)
    return manifest


def _tallies(data: Data) -> dict[str, Tally]:
    tallies = {key: Tally(source.name, source.weight) for key, source in data.all_sources.items()}
    return tallies | ({"data.heldout_path": Tally(data.heldout_path)} if data.heldout_path else {})


def _samples(data: Data, sampler: Sampler, tallies: dict[str, Tally]) -> Iterator[tuple[Split, Encoded, Tally]]:
    """All samples that are kept, each with its split, in order: one of each source in turn, then those of heldout_path.

    In turn, so that the first held-out samples, which are all that an evaluation may look at, are not of one source alone.
    """
    waiting = {key: _drawn(data, sampler, key, source, tallies[key]) for key, source in data.all_sources.items()}
    while waiting:
        for key, samples in list(waiting.items()):
            if (found := next(samples, None)) is None:
                del waiting[key]
            else:
                yield from ((split, sample, tallies[key]) for split, sample in found)
    if data.heldout_path:
        rows = read_path(data.heldout_path, "data.heldout_path", data.dataset_split)
        tally = tallies["data.heldout_path"]
        for group in sampler.samples(rows, data, "data", tally):
            yield from (("heldout", sample, tally) for sample in group)


def _drawn(
    data: Data, sampler: Sampler, key: str, source: WeightedSource, tally: Tally
) -> Iterator[list[tuple[Split, Encoded]]]:
    """The samples of each row that its weight draws, each time; held-out ones are stored once."""
    for turn, share in enumerate(shares(source.weight)):
        rows = drawn(read(source, key), share, data.seed)
        for group in sampler.samples(rows, source, key, tally, again=turn > 0):
            # Pieces of one row stay together.
            split: Split = "train" if data.heldout_path else _split(group[0], data)
            if split == "train" or turn == 0:
                yield [(split, sample) for sample in group]


def _is_new(sample: Encoded, seen: set[bytes]) -> bool:
    """Whether no sample of `seen` trains these tokens; it is one of them then. 16 bytes of a hash stand for a sample."""
    trained = bytes(label != IGNORED for label in sample[1])
    digest = hashlib.sha256(_content(sample) + trained).digest()[:16]
    before = len(seen)
    seen.add(digest)
    return len(seen) > before


def _content(sample: Encoded) -> bytes:
    import numpy

    return numpy.asarray(sample[0], dtype="<i4").tobytes()


def _split(sample: Encoded, data: Data) -> Split:
    """By the tokens as they are stored, so that equal samples never stand on both sides."""
    digest = hashlib.sha256(str(data.seed).encode() + b":" + _content(sample)).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < data.heldout_fraction * 2**64 else "train"


def _refuse_empty(data: Data, counts: dict[Split, SplitCounts], tallies: list[Tally]) -> None:
    source = ", ".join(source.name for source in data.all_sources.values())
    rows, too_long, untrained = (_total(tallies, what) for what in ("rows", "dropped_too_long", "dropped_untrained"))
    kept = counts["train"].samples + counts["heldout"].samples
    for tally in tallies[: len(data.all_sources)]:
        if not tally.rows:
            drawn_of = f": none was drawn at weight {tally.weight}, if it has any" if tally.weight < 1 else ""
            raise DataError(f"{tally.name}: empty, not one row was found{drawn_of}")
    if not kept:
        raise DataError(
            f"{source}: none of {rows} rows is left: {too_long} are longer than data.max_length "
            f"{data.max_length}, {untrained} have no trained token within it (no answer, or an empty or cut one)"
        )
    names: dict[Split, str] = {"train": "training", "heldout": "held-out"}
    for split, name in names.items():
        if counts[split].samples:
            continue
        if data.heldout_path:
            where = data.heldout_path if split == "heldout" else source
            raise DataError(
                f"{where}: no {name} sample is left of it; {too_long} were too long, {untrained} without a trained token"
            )
        raise DataError(
            f"{source}: no {name} sample: {kept} samples, shared out by content at data.heldout_fraction "
            f"{data.heldout_fraction}; give more data, change the fraction, or name data.heldout_path"
        )


def _total(tallies: list[Tally], what: str) -> int:
    return sum(getattr(tally, what) for tally in tallies)


def _manifest(data: Data, counts: dict[Split, SplitCounts], tallies: list[Tally], out: Path) -> Manifest:
    tokenizer, content = hashlib.sha256(), hashlib.sha256()
    for file in sorted(path for path in (out / "tokenizer").rglob("*") if path.is_file()):
        tokenizer.update(f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    for shard in (shard for split in counts.values() for shard in split.shards):
        content.update(f"{shard.file}:{shard.sha256}\n".encode())
    lengths = sum((tally.lengths for tally in tallies), Counter[int]())
    summed = ("rows", "bad", "truncated", "split", "dropped_too_long", "dropped_untrained", "duplicates")
    kept = ("name", "weight", "rows", "bad", "samples", "tokens", "trained_tokens")
    return Manifest(
        source=", ".join(source.name for source in data.all_sources.values()),
        format=", ".join(dict.fromkeys(tally.form for tally in tallies if tally.form)),
        **{what: _total(tallies, what) for what in summed},
        max_length=data.max_length,
        longest=max(lengths),
        tokens_read=sum(length * rows for length, rows in lengths.items()),
        histogram=_histogram(lengths),
        sources=[SourceCounts(format=tally.form, **{what: getattr(tally, what) for what in kept}) for tally in tallies],
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
