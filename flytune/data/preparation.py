"""Data preparation: rows to tokenized shards with a manifest, once and on CPUs, so that no GPU waits for
it."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from flytune.data import contract, progress, unused_settings
from flytune.data.bad_rows import BadRows
from flytune.data.counts import COUNTS, Tally, ends_of, total, write_examples
from flytune.data.mixture import SourceStream, bytes_of, mixed
from flytune.data.process import Split, StoredSample, digest
from flytune.data.progress import PROGRESS, Progress
from flytune.data.rows import row_kind
from flytune.data.rows.prompts import check_references
from flytune.data.shards import MANIFEST, SplitWriter, content_hash
from flytune.data.sources import refuse_splits
from flytune.data.stored_samples import StoredSamples, parts
from flytune.data.tokenizer import check_rows, load_tokenizer
from flytune.data.workers import Workers
from flytune.errors import DataError
from flytune.files import written_atomically
from flytune.models import config_json, images, tokenizers, trial
from flytune.models.scoring import IGNORED
from flytune.recipe import Data, DataRequest
from flytune.records import Bin, Manifest, SourceCounts, SplitCounts
from flytune.sentences import counted

_BINS = 12


def refuse_empty(data: Data, counts: dict[Split, SplitCounts], tallies: list[Tally]) -> None:
    """Check that there are training samples and held-out samples.

    Raises:
        DataError: one of the splits is empty; the message says why the rows were dropped.
    """
    source = ", ".join(source.name for source in data.all_sources.values())
    rows, too_long, untrained = (
        total(tallies, what) for what in ("rows", "dropped_too_long", "dropped_untrained")
    )
    kept = counts["train"].samples + counts["heldout"].samples
    for tally in tallies[: len(data.all_sources)]:
        if not tally.rows:
            reason = f", or none was drawn at weight {tally.weight}" if tally.weight < 1 else ""
            raise DataError(f"{tally.name}: no row was found; the file is empty{reason}")
    if not kept:
        lengths = sum((tally.lengths for tally in tallies), Counter[int]())
        longer = sum(count for length, count in lengths.items() if length > data.max_length)
        longest = f" (the longest has {counted(max(lengths), 'token')})" if longer else ""
        advice = "raise data.max_length" if longer else "give the rows answers"
        raise DataError(
            f"{source}: none of {counted(rows, 'row')} is left: {longer:,} are longer than data.max_length "
            f"{data.max_length}{longest}, {untrained:,} have no trained token within it (the answer is "
            f"missing, empty or cut off); {advice}"
        )
    names: dict[Split, str] = {"train": "training", "heldout": "held-out"}
    for split, name in names.items():
        if counts[split].samples or (split == "heldout" and not data.holds_out):
            continue
        if data.heldout_key:
            where = data.heldout_name if split == "heldout" else source
            raise DataError(
                f"{where}: no {name} sample is left; {too_long} were too long, {untrained} had no trained "
                "token"
            )
        refuse_undivided(data, name, kept)


def refuse_undivided(data: Data, name: str, samples: int) -> NoReturn:
    """Refuse data whose samples all stay together in one split; `name` is the other split.

    Raises:
        DataError: always.
    """
    source = ", ".join(source.name for source in data.all_sources.values())
    raise DataError(
        f"{source}: no {name} sample: {counted(samples, 'sample')} with the same content, or the same "
        "prompt, which stay together; add data, set data.heldout_path, or write data.heldout_fraction: 0"
    )


def split_at(data: Data, counts: dict[Split, SplitCounts], tallies: list[Tally]) -> int | None:
    """Return the number below which rows are to be held out because data.heldout_fraction has left a split
    without any.

    The row with the smallest number is held out, or that with the largest one is trained on, with all that
    have the same content: the same rows whatever the fraction. None if both splits have samples, or the data
    cannot be divided.
    """
    ends = ends_of([number for tally in tallies for number in tally.split_range])
    if data.heldout_key or not data.holds_out or not ends or ends[0] == ends[1]:
        return None
    if not counts["heldout"].samples:
        return ends[0] + 1
    return None if counts["train"].samples else ends[1]


def manifest_of(
    request: DataRequest,
    counts: dict[Split, SplitCounts],
    tallies: list[Tally],
    out: Path,
    other_tokens: str | None,
) -> Manifest:
    """Return the manifest of the data in `out`, which includes tokenizer/; `other_tokens` as in the
    record."""
    data = request.data
    tokenizer = hashlib.sha256()
    for file in sorted(path for path in (out / "tokenizer").rglob("*") if path.is_file()):
        tokenizer.update(f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    lengths = sum((tally.lengths for tally in tallies), Counter[int]())
    left_out = sum((tally.left_out for tally in tallies), Counter[str]())
    return Manifest(
        source=", ".join(source.name for source in data.all_sources.values()),
        format=", ".join(dict.fromkeys(tally.form for tally in tallies if tally.form)),
        **{what: total(tallies, what) for what in COUNTS if what in Manifest.model_fields},
        max_length=data.max_length,
        longest=max(lengths),
        first_missing=next((tally.first_missing for tally in tallies if tally.first_missing), ""),
        thoughts=dict(+sum((tally.thoughts for tally in tallies), Counter[str]())),
        notes=dict(+sum((tally.notes for tally in tallies), Counter[str]())),
        left_out=dict(sorted(left_out.items(), key=lambda item: (-item[1], item[0]))),
        unused=unused_settings.listed(data, tallies),
        histogram=_histogram(lengths),
        sources=[
            SourceCounts.model_validate(vars(tally) | {"format": tally.form}, extra="ignore")
            for tally in tallies
        ],
        train=counts["train"],
        heldout=counts["heldout"],
        tokenizer_sha256=tokenizer.hexdigest(),
        other_tokens=other_tokens,
        content_sha256=content_hash(shard for split in counts.values() for shard in split.shards),
        max_pixels=data.max_pixels,
        row_kind=request.row_kind,
        classes=request.classes,
        negatives=request.negatives,
    )


def _histogram(lengths: Counter[int]) -> list[Bin]:
    """Return at most _BINS bins of equal width, from the shortest row to the longest."""
    shortest, longest = min(lengths), max(lengths)
    width = -(-(longest + 1 - shortest) // _BINS)
    bins: Counter[int] = Counter()
    for length, rows in lengths.items():
        bins[(length - shortest) // width] += rows
    lows = range(shortest, longest + 1, width)
    return [Bin(low=low, high=low + width, samples=bins[number]) for number, low in enumerate(lows)]


logger = logging.getLogger(__name__)
_COMPARED = 256
"""Samples whose texts the base's tokenizer is compared with, where its class has other rules than its
tokenizer.json."""


def prepare(
    request: DataRequest, out: Path, processes: int | None = None, trains_next: bool = False
) -> Manifest:
    """Read, render, tokenize and split the data of `request` into the folder `out`.

    Writes train/*.parquet and heldout/*.parquet (columns input_ids and labels, lists of int32), tokenizer/,
    bad_rows.jsonl if rows were set aside, examples.json if rows were cut or dropped, contract.json, and
    manifest.json last. With data.packing a row of train is a block of samples, with their lengths in a column
    seq_lengths; held-out samples are never packed, because they are scored one by one. A kind of rows (rows/)
    may have further columns.

    Equal requests give equal bytes, whatever the number of `processes` (by default all cores), and however
    often the run was killed: `out` is new, empty, or the folder of a killed run of the same request, which
    resumes after its last complete shards. Memory does not grow with the data (but see readers.read;
    data.deduplicate takes 80 bytes a sample). `trains_next` as in contract.enforce.

    Raises:
        DataError: the data or the tokenizer cannot be used.
        RewardError: a reward fails, or does not tell a reference answer from an empty one.
    """
    data = request.data
    if out.exists() and any(out.iterdir()) and not (out / PROGRESS).exists():
        raise DataError(f"{out}: not empty; prepared data needs a folder of its own")
    refuse_splits(data)
    tokenizer, rows = load_tokenizer(request.model, data), config_json.table_rows(request.model)
    kind = row_kind(request.row_kind, request.negatives)
    if kind.ends_texts:
        tokenizers.end_texts(tokenizer, request.model)
    check_rows(tokenizer, rows, request.model)
    trial.save_all(request.model, tokenizer)
    before = progress.find(out, request, list(_tallies(data)))
    if (out / MANIFEST).exists():  # killed between the last two writes below
        (out / PROGRESS).unlink()
        return Manifest.read(out / MANIFEST)
    with ExitStack() as opened:
        size = bytes_of(data)
        bar = opened.enter_context(_bar(size))
        bad = opened.enter_context(BadRows(out, data.max_bad_fraction).opened())
        workers = opened.enter_context(
            Workers(request, tokenizer, processes, size, before.heldout_below, out)
        )
        length = data.max_length if data.packing else None
        tallies = before.tallies or _tallies(data)
        writers: dict[Split, SplitWriter] = {
            "train": opened.enter_context(SplitWriter(out, "train", length, before.train, kind.columns)),
            "heldout": opened.enter_context(SplitWriter(out, "heldout", None, before.heldout, kind.columns)),
        }
        streams = [
            SourceStream(key, data, workers, tally, before.places[key]) for key, tally in tallies.items()
        ]
        numbers = {stream: number for number, stream in enumerate(streams)}
        bad.resume(
            sum(tally.rows for tally in tallies.values()), before.bad, before.first_bad, before.bad_rows
        )
        seen = _digests(out, before, kind.sequences) if data.deduplicate else set()
        for row in mixed(streams, bad, bar):
            for stream, kept in row:
                _write(kept, stream.tally, numbers[stream], writers, seen)
            if any(writer.is_full for writer in writers.values()):
                _end_shards(request, out, writers, streams, bad, before.heldout_below)
        _end_shards(request, out, writers, streams, bad, before.heldout_below)
        bad.check()
    counts = {split: writer.counts() for split, writer in writers.items()}
    if (
        before.heldout_below is None
        and (number := split_at(data, counts, list(tallies.values()))) is not None
    ):
        progress.start(out, request, list(tallies), number)
        return prepare(request, out, processes, trains_next)
    refuse_empty(data, counts, list(tallies.values()))
    tokenizers.note_difference(tokenizer, _first_texts(tokenizer, parts(out, counts["train"])))
    tokenizers.write_files(tokenizer, request.model, out / "tokenizer")
    if kind.has_images:
        images.write_files(request.model, out / "tokenizer", with_template=data.chat_template is None)
    manifest = manifest_of(request, counts, list(tallies.values()), out, tokenizer.otherwise)
    write_examples(
        [example for tally in tallies.values() for example in tally.examples], data.max_length, out
    )
    contract.enforce(out, manifest, data, tokenizer, rows, trains_next)
    check_references(request, [counts["train"], counts["heldout"]], out, tokenizer)
    with written_atomically(out / MANIFEST) as temporary:
        manifest.write(temporary)
    (out / PROGRESS).unlink()
    if tokenizer.otherwise:
        logger.info("%s: the base's tokenizer.json is used", tokenizer.otherwise)
    train, heldout = manifest.train, manifest.heldout
    logger.info(
        "prepared %d rows: %d train, %d held-out samples", manifest.rows, train.samples, heldout.samples
    )
    if train.blocks is not None:
        logger.info(
            "packed into %d blocks, %.2f %% of them samples", train.blocks, 100 * manifest.useful_share
        )
    return manifest


def _first_texts(tokenizer: Any, stored: Iterable[StoredSamples]) -> Iterator[str]:
    """Yield the texts of the first samples, which the base's tokenizer is compared with."""
    samples = (
        part.ids[start : start + length]
        for part in stored
        for start, length in zip(part.starts, part.lengths, strict=True)
    )
    for ids in islice(samples, _COMPARED):
        yield tokenizer.decode([number for number in ids.tolist() if 0 <= number < len(tokenizer)])


def _bar(size: int | None) -> "tqdm[Any]":
    """Return a bar of bytes with the time left, or of rows if the size is unknown."""
    if size is None:
        return tqdm(desc="prepare", unit=" rows", delay=2)
    return tqdm(desc="prepare", total=size, unit="B", unit_scale=True, delay=2)


def _tallies(data: Data) -> dict[str, Tally]:
    tallies = {key: Tally(source.name, source.weight) for key, source in data.all_sources.items()}
    return tallies | ({data.heldout_key: Tally(data.heldout_name)} if data.heldout_key else {})


def _write(
    kept: list[StoredSample], tally: Tally, number: int, writers: dict[Split, SplitWriter], seen: set[bytes]
) -> None:
    for sample in kept:
        if sample.digest is not None:
            if sample.digest in seen:
                tally.duplicates += 1
                continue
            seen.add(sample.digest)
        writers[sample.split].add((sample.ids, sample.labels, *sample.values), number)
        tally.keep(len(sample.ids), int((sample.labels != IGNORED).sum()))


def _end_shards(
    request: DataRequest,
    out: Path,
    writers: dict[Split, SplitWriter],
    streams: list[SourceStream],
    bad: BadRows,
    heldout_below: int | None,
) -> None:
    """End the shards of both splits, and save the progress from which a killed run resumes."""
    progress.save(
        Progress(
            request=progress.digest_of(request),
            places={stream.key: stream.position for stream in streams},
            tallies={stream.key: stream.tally for stream in streams},
            train=writers["train"].counts(),
            heldout=writers["heldout"].counts(),
            heldout_below=heldout_below,
            bad_rows=bad.size(),
            bad=bad.count,
            first_bad=bad.first,
        ),
        out,
    )


def _digests(out: Path, before: Progress, per_row: int) -> set[bytes]:
    """Return the hashes of all rows that are already stored, of `per_row` sequences."""
    return {
        digest(
            part.ids[start : start + length],
            part.labelled[start : start + length],
            part.label_of(number),
            "" if part.images is None else part.images[number],
        )
        for counts in (before.train, before.heldout)
        for part in parts(out, counts)
        for number, (start, length) in enumerate(
            zip(part.starts[::per_row], part.lengths.reshape(-1, per_row).sum(axis=1), strict=True)
        )
    }
