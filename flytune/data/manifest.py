"""The manifest of a prepared data set, and errors where no sample is left."""

import hashlib
from collections import Counter
from pathlib import Path

from flytune.data.counts import Tally, ends_of, total
from flytune.data.mixture import Split
from flytune.data.shards import content_hash
from flytune.errors import DataError
from flytune.recipe import Data
from flytune.records import Bin, Manifest, SourceCounts, SplitCounts
from flytune.row_names import RowKindName
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
        raise DataError(
            f"{source}: no {name} sample: {counted(kept, 'sample')} with the same content, or the same "
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
    data: Data,
    counts: dict[Split, SplitCounts],
    tallies: list[Tally],
    out: Path,
    row_kind: RowKindName,
    other_tokens: str | None,
) -> Manifest:
    """Return the manifest of the data in `out`, which includes tokenizer/; `other_tokens` as in the
    record."""
    tokenizer = hashlib.sha256()
    for file in sorted(path for path in (out / "tokenizer").rglob("*") if path.is_file()):
        tokenizer.update(f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    lengths = sum((tally.lengths for tally in tallies), Counter[int]())
    left_out = sum((tally.left_out for tally in tallies), Counter[str]())
    summed = (
        "rows",
        "bad",
        "truncated",
        "split",
        "dropped_too_long",
        "dropped_untrained",
        "duplicates",
        "control_tokens",
        "contradicted",
        "tokens_read",
        "truncated_tokens",
        "dropped_tokens",
    )
    kept = ("name", "weight", "rows", "bad", "samples", "tokens", "trained_tokens")
    return Manifest(
        source=", ".join(source.name for source in data.all_sources.values()),
        format=", ".join(dict.fromkeys(tally.form for tally in tallies if tally.form)),
        **{what: total(tallies, what) for what in summed},
        max_length=data.max_length,
        longest=max(lengths),
        thoughts=dict(+sum((tally.thoughts for tally in tallies), Counter[str]())),
        notes=dict(+sum((tally.notes for tally in tallies), Counter[str]())),
        left_out=dict(sorted(left_out.items(), key=lambda one: (-one[1], one[0]))),
        histogram=_histogram(lengths),
        sources=[
            SourceCounts(format=tally.form, **{what: getattr(tally, what) for what in kept})
            for tally in tallies
        ],
        train=counts["train"],
        heldout=counts["heldout"],
        tokenizer_sha256=tokenizer.hexdigest(),
        other_tokens=other_tokens,
        content_sha256=content_hash(shard for split in counts.values() for shard in split.shards),
        row_kind=row_kind,
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
