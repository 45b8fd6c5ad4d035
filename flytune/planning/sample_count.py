"""Number of training samples: counted in the local files that a recipe names, before a task reads them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flytune import json_core, sentences
from flytune.cluster import uploads
from flytune.data import readers, row_kind, sources, windows
from flytune.recipe import Recipe, Source
from flytune.records import Plan

COUNTED_BYTES = 200_000_000
"""Bytes of a file of JSON Lines whose lines are counted; the number of further ones is estimated from
these."""
PARSED_BYTES = 8_000_000
"""Bytes of other files of a source that are parsed, as they are stored; the number of further rows is
estimated from these."""
_LEAST_BYTES = 100_000
"""Bytes of each further file that are parsed after that."""


class SampleCount(NamedTuple):
    """Number of training samples, without held-out ones."""

    samples: int | None
    """None if it is not known."""
    origin: str
    """A sentence on the files that were counted, and on what was not read."""
    warnings: tuple[str, ...] = ()
    """Doubts about their first rows (first_rows.py)."""


class _Rows(NamedTuple):
    """Rows of one source; None if they are not known."""

    rows: int | None
    origin: str
    samples_a_row: int = 1


def counted(recipe: Recipe) -> SampleCount:
    """Return the number of training samples of a recipe, by the local files that it names; no address is
    read.

    A row counts as a sample, although long rows may be split, and bad, empty and equal ones dropped later.

    Raises:
        DataError: a local source does not exist, or cannot be read.
    """
    data = recipe.data
    rows_by_source = [(_rows(source, key, recipe), source.weight) for key, source in data.all_sources.items()]
    origin = "; ".join(dict.fromkeys(rows_of_source.origin for rows_of_source, _ in rows_by_source))
    if data.packing or any(rows_of_source.rows is None for rows_of_source, _ in rows_by_source):
        reason = (
            "as many as the packed blocks, which are not known before the preparation; "
            if data.packing
            else ""
        )
        return SampleCount(None, f"training samples: {reason}{origin}")
    weighted = sum(
        (rows_of_source.rows or 0) * rows_of_source.samples_a_row * weight
        for rows_of_source, weight in rows_by_source
    )
    if not weighted:
        return SampleCount(None, f"training samples: none, {origin}")
    held_out, heldout = 0.0, ""
    if data.holds_out and not data.heldout_key:
        held_out = max(1.0, weighted * data.heldout_fraction)
        heldout = f", of which a share of {data.heldout_fraction:g} is held out"
    samples = max(1, round(weighted - held_out))
    return SampleCount(samples, f"{sentences.counted(samples, 'training sample')}: {origin}{heldout}")


def told(plan: Plan, count: SampleCount) -> Plan:
    """Return the plan with reasons that name the origin of its number of samples, and what is doubtful about
    them."""
    warnings = [f"warning: {warning}" for warning in count.warnings]
    return plan.model_copy(update={"reasons": [*plan.reasons, count.origin, *warnings]})


def _rows(source: Source, key: str, recipe: Recipe) -> _Rows:
    most, path = source.max_samples, source.path
    kind = row_kind(recipe.row_kind)
    each = kind.rows_of({}, source)
    limit = (
        "and has no max_samples"
        if most is None
        else f"and is taken to have the {sentences.counted(most, 'row')} of max_samples"
    )
    if path is None or ("://" in path and not path.startswith("file://")):
        return _Rows(most, f"{key}: {source.name} was not read, {limit}", each)
    if windows.is_windowed(path):
        return _Rows(most, f"{key}: {path} is a file for each day, which was not read, {limit}", each)
    if not _place(source).exists() and not uploads.is_local("data.path", path):
        return _Rows(most, f"{key}: {path} is on a volume of the pods and not on this machine, {limit}", each)
    first, rows, is_estimate = _count(source, key)
    if rows is None:
        return _Rows(most, f"{key}: {path} is too large to be counted, {limit}", each)
    each = kind.rows_of(first, source)
    how = "estimated" if is_estimate else "counted"
    if most is not None and rows >= most:
        return _Rows(most, f"{sentences.counted(most, 'row')} of {path}, as max_samples says", each)
    return _Rows(
        rows,
        f"{sentences.counted(rows, 'row')} {how} in {path}" + (", each of two samples" if each == 2 else ""),
        each,
    )


def _count(source: Source, key: str) -> tuple[dict[str, Any], int | None, bool]:
    """Return the first row of a local source, the number of its rows, if it is known, and whether this is an
    estimate."""
    place = _place(source)
    if place.is_file() and place.suffix in (".jsonl", ".ndjson"):
        return _count_lines(place, source.max_samples)
    files = sources.locate(str(source.path), f"{key}.path", source.exclude)
    sizes = {} if files.saved else {file: Path(file).stat().st_size for file in files.files}
    if files.saved:
        saved = (
            _good(readers.read(source, key)) if folder_bytes(str(source.path)) <= PARSED_BYTES else iter(())
        )
        first = next(saved, {})
        return first, 1 + sum(1 for _ in saved) if first else None, False
    first = {}
    total, is_estimate, left = 0, False, PARSED_BYTES
    for file, size in sizes.items():
        if sources.kind(file) == "json" and size > PARSED_BYTES:  # it would be read completely
            return first, None, False
        most = None if source.max_samples is None else source.max_samples - total
        row, rows, read = _count_file(file, source, key, left, most)
        first, left = first or row, max(left - read, _LEAST_BYTES)
        is_cut = 0 < read < size and rows != most
        is_estimate = is_estimate or is_cut
        total += round(rows * size / read) if is_cut else rows
        if total == source.max_samples:
            break
    return first, total, is_estimate


def _count_file(
    file: str, source: Source, key: str, budget: int, most: int | None
) -> tuple[dict[str, Any], int, int]:
    """Return the first row of a file, the rows up to `most` that are read within `budget` bytes, and these
    bytes.

    The rows of Parquet are in its metadata; its bytes are 0.
    """
    rows, read = 0, 0

    def advance(more: int) -> None:
        nonlocal read
        read += more

    rows_read = _good(readers.read_path(file, f"{key}.path", source, advance))
    first = next(rows_read, {})
    if sources.kind(file) == "parquet":
        from pyarrow import parquet

        return first, parquet.read_metadata(file).num_rows, 0
    for rows, _ in enumerate(rows_read if first else (), 2):
        if read > budget or rows == most:
            break
    return first, max(rows, bool(first)), read


def _count_lines(file: Path, most: int | None) -> tuple[dict[str, Any], int, bool]:
    """Return what `_count` does for a file of JSON Lines, without parsing more than its first row."""
    first, rows, read = b"", 0, 0
    with file.open("rb") as opened:
        while (line := opened.readline(readers.LARGEST_LINE)) and read < COUNTED_BYTES and rows != most:
            read += len(line)
            if line.strip():
                first, rows = first or line, rows + 1
    size = file.stat().st_size
    is_estimate = rows != most and read < size
    try:
        row = json_core.load(first, readers.LARGEST_LINE) if first else {}
    except json_core.JSONError:
        row = {}
    return (
        row if isinstance(row, dict) else {},
        round(rows * size / read) if is_estimate else rows,
        is_estimate,
    )


def _good(rows: Iterator[readers.Row]) -> Iterator[dict[str, Any]]:
    return (row for row, _ in rows if isinstance(row, dict))


def folder_bytes(path: str) -> int:
    """Return the bytes of all files in a local folder."""
    return sum(file.stat().st_size for file in _local(path).rglob("*") if file.is_file())


def _place(source: Source) -> Path:
    return _local(str(source.path))


def _local(path: str) -> Path:
    return Path(path.removeprefix("file://")).expanduser()
