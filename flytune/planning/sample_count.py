"""Number of training samples, counted in the local files that a recipe names, and doubts about their first
rows, before a task reads them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flytune import json_core, sentences
from flytune.cluster import uploads
from flytune.data import readers, row_kind, sources, windows
from flytune.data.counts import ends_of
from flytune.data.formats import check_columns
from flytune.data.preparation import refuse_undivided
from flytune.data.process import Chunk, Sampler, Samples
from flytune.data.tokenizer import Encoder, check_rows, load_tokenizer
from flytune.errors import DataError
from flytune.models import config_json, tensor_headers
from flytune.recipe import Data, DataRequest, Recipe, Source
from flytune.records import Plan

COUNTED_BYTES = 200_000_000
"""Bytes of a file of JSON Lines whose lines are counted; the number of further ones is estimated from
these."""
PARSED_BYTES = 8_000_000
"""Bytes of other files of a source that are parsed, as they are stored; the number of further rows is
estimated from these."""
_LEAST_BYTES = 100_000
"""Bytes of each further file that are parsed after that."""
ROWS = 256
"""Rows of each source that are read."""
_BECOMES = {"truncate": "cut", "drop": "dropped"}
"""Words for the treatment of longer rows, by data.too_long; those that are split are trained completely."""


class SampleCount(NamedTuple):
    """Number of training samples, without held-out ones."""

    samples: int | None
    """None if it is not known."""
    origin: str
    """A sentence on the files that were counted, and on what was not read."""
    warnings: tuple[str, ...] = ()
    """Doubts about their first rows."""


class _Rows(NamedTuple):
    """Rows of one source; None if they are not known."""

    rows: int | None
    origin: str
    samples_a_row: int = 1


def counted(recipe: Recipe) -> SampleCount:
    """Return the number of training samples of a recipe, by the local files that it names; no address is
    read.

    A row counts as a sample, although bad, empty and equal ones may be dropped later; where long rows are
    split, as the pieces that the first rows have, if these can be tokenized here.

    Raises:
        DataError: a local source does not exist, or cannot be read; or `doubts` raises it of rows that are
            split.
    """
    data = recipe.data
    rows_by_source = [(_rows(source, key, recipe), source.weight) for key, source in data.all_sources.items()]
    pieces = _pieces(recipe) if data.too_long == "split" else dict.fromkeys(data.all_sources, 1.0)
    origin = "; ".join(dict.fromkeys(rows_of_source.origin for rows_of_source, _ in rows_by_source))
    if data.packing or any(rows_of_source.rows is None for rows_of_source, _ in rows_by_source):
        reason = (
            "as many as the packed blocks, which are not known before the preparation; "
            if data.packing
            else ""
        )
        return SampleCount(None, f"training samples: {reason}{origin}")
    weighted = sum(
        (rows_of_source.rows or 0) * rows_of_source.samples_a_row * weight * pieces.get(key, 1.0)
        for key, (rows_of_source, weight) in zip(data.all_sources, rows_by_source, strict=True)
    )
    if not weighted:
        return SampleCount(None, f"training samples: none, {origin}")
    held_out, heldout = 0.0, ""
    if data.holds_out and not data.heldout_key:
        held_out = max(1.0, weighted * data.heldout_fraction)
        heldout = f", of which a share of {data.heldout_fraction:g} is held out"
    samples = max(1, round(weighted - held_out))
    several = ""
    if data.too_long == "split" and len(pieces) == len(data.all_sources):
        means = ", ".join(f"{pieces_of_row:.3g}" for pieces_of_row in pieces.values())
        several = (
            "; rows longer than data.max_length become several samples each (data.too_long: split): the mean "
            f"of the first {ROWS} rows of each source is {means}"
        )
    elif data.too_long == "split":
        several = (
            "; rows longer than data.max_length become several samples each (data.too_long: split), which "
            "are not counted: steps, hours and price are of the fewest; --samples says how many there are"
        )
    return SampleCount(
        samples, f"{sentences.counted(samples, 'training sample')}: {origin}{heldout}{several}"
    )


def with_origin(plan: Plan, count: SampleCount) -> Plan:
    """Return the plan with reasons that name the origin of its number of samples, and what is doubtful about
    them."""
    warnings = [f"warning: {warning}" for warning in count.warnings]
    return plan.model_copy(update={"reasons": [*plan.reasons, count.origin, *warnings]})


def _rows(source: Source, key: str, recipe: Recipe) -> _Rows:
    most, path = source.max_samples, source.path
    kind = row_kind(recipe.row_kind)
    per_row = kind.rows_of({}, source)
    limit = (
        "and has no max_samples"
        if most is None
        else f"and is taken to have the {sentences.counted(most, 'row')} of max_samples"
    )
    if path is None or ("://" in path and not path.startswith("file://")):
        return _Rows(most, f"{key}: {source.name} was not read, {limit}", per_row)
    if windows.is_windowed(path):
        return _Rows(most, f"{key}: {path} is a file for each day, which was not read, {limit}", per_row)
    if not _place(source).exists() and not uploads.is_local("data.path", path):
        return _Rows(
            most, f"{key}: {path} is on a volume of the pods and not on this machine, {limit}", per_row
        )
    first, rows, is_estimate = _count(source, key)
    if rows is None:
        return _Rows(most, f"{key}: {path} is too large to be counted, {limit}", per_row)
    per_row = kind.rows_of(first, source)
    how = "estimated" if is_estimate else "counted"
    if most is not None and rows >= most:
        return _Rows(most, f"{sentences.counted(most, 'row')} of {path}, as max_samples says", per_row)
    return _Rows(
        rows,
        f"{sentences.counted(rows, 'row')} {how} in {path}"
        + (", each of two samples" if per_row == 2 else ""),
        per_row,
    )


def _pieces(recipe: Recipe) -> dict[str, float]:
    """Return the samples that a row becomes where long ones are split, the mean of the first rows, by the
    source's key; without those whose rows, or whose tokenizer, are not on this machine."""
    tokenizer = _local_tokenizer(recipe)
    if tokenizer is None:
        return {}
    sampler, pieces = Sampler(DataRequest.of(recipe, "plan"), tokenizer), dict[str, float]()
    for key in _readable(recipe.data):
        if key not in recipe.data.all_sources:
            continue  # held-out data
        rows = _first_samples(sampler, recipe.data, key)[0].rows
        if rows:
            pieces[key] = sum(map(len, rows)) / len(rows)
    return pieces


def _first_samples(sampler: Sampler, data: Data, key: str) -> tuple[Samples, int, bool]:
    """Return the samples of a source's first rows, the number of these, and whether there are no others."""
    rows = list(readers.rows_of(data, key, most=ROWS + 1))
    first = rows[:ROWS]
    return sampler.samples(Chunk(key, first, "", "", 1.0, False)), len(first), len(rows) <= ROWS


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


def doubts(recipe: Recipe) -> list[str]:
    """Return what is doubtful about the first rows, a sentence for each source; empty if nothing is.

    Rows are rendered and tokenized where the base is a folder of this machine. For others, whose tokenizer
    would have to be fetched, columns and their content are read alone. Data of the hub, at addresses, and in
    files of each day is not read.

    Raises:
        DataError: as data.prepare: a row, the tokenizer or the template cannot be used; none of the first
            rows is trained; or all rows that there are stay together in one split.
    """
    data = recipe.data
    tokenizer = _local_tokenizer(recipe)
    sampler = Sampler(DataRequest.of(recipe, "plan"), tokenizer)
    lines = _of_weights(recipe)
    split_range: list[int] = []
    complete: list[Samples] = []
    for key, source in _readable(data).items():
        check_columns(source.columns, "data" if key == data.heldout_key else key)
        samples, rows, are_all = _first_samples(sampler, data, key)
        which = f"{source.name}: {'all' if are_all else 'the first'} {sentences.counted(rows, 'row')}"
        if samples.bad and len(samples.bad) == rows:
            error = samples.bad[0][1]
            if are_all:
                raise error
            lines.append(f"{which}: none can be used; {error}")
        elif tokenizer and rows:
            lines += _of_samples(samples, which, rows, data)
            split_range = ends_of([*split_range, *samples.tally.split_range])
            complete += [samples] if are_all else []
    is_all = len(complete) == len(data.all_sources)
    count = sum(len(row) for samples in complete for row in samples.rows)
    if data.holds_out and is_all and count > 1 and len(set(split_range)) == 1:
        refuse_undivided(data, "held-out or no training", count)
    return lines


def _of_weights(recipe: Recipe) -> list[str]:
    """Return that a base in a folder of this machine has no weights, which a plan does not read."""
    folder = Path(recipe.model.name_or_path).expanduser()
    absence = tensor_headers.absence(folder) if folder.is_dir() else ""
    return [f"model.name_or_path: {folder}: {absence}; no run trains it"] if absence else []


def _local_tokenizer(recipe: Recipe) -> Encoder | None:
    """Return the tokenizer of a base that is a folder of this machine; None of others."""
    if not Path(recipe.model.name_or_path).expanduser().is_dir():
        return None
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    check_rows(tokenizer, config_json.table_rows(recipe.model), recipe.model)
    return Encoder(tokenizer)


def _of_samples(samples: Samples, which: str, rows: int, data: Data) -> list[str]:
    """Return what is doubtful about the samples of the first rows of a source.

    Raises:
        DataError: none of them is trained.
    """
    lengths = samples.tally.lengths
    longer = sum(count for length, count in lengths.items() if length > data.max_length)
    than = ""
    if longer:
        than = (
            f"{longer:,} are longer than data.max_length {data.max_length} (the longest has "
            f"{sentences.counted(max(lengths), 'token')})"
        )
    if not samples.rows:
        reason = f"{than}; raise it" if longer else "the answers are missing or empty; give the rows answers"
        raise DataError(f"{which}: none has a trained token: {reason}")
    if 2 * longer > rows and data.too_long in _BECOMES:
        return [f"{which}: {than}, and are {_BECOMES[data.too_long]}; raise it, or set data.too_long"]
    return []


def _readable(data: Data) -> dict[str, Source]:
    """Return the sources that can be read here at once, and the held-out data, by their keys in the
    recipe."""
    readable = {}
    for key, source in data.all_read.items():
        place = (source.path, f"{key}.path", source.exclude)
        if key == data.heldout_key:
            place = (data.heldout_path, key, [])
        if _is_readable(*place):
            readable[key] = source
    return readable


def _is_readable(path: str | None, key: str, exclude: list[str]) -> bool:
    """Return whether rows can be read here at once: no hub, address or volume of pods, nothing large to be
    read completely."""
    if path is None or ("://" in path and not path.startswith("file://")) or windows.is_windowed(path):
        return False
    try:
        files = sources.locate(path, key, exclude)
    except DataError:
        return False  # on a volume of the pods; uploads.missing has refused what is to be here and is not
    if files.saved:
        return folder_bytes(path) <= PARSED_BYTES
    return not any(
        sources.kind(file) == "json" and Path(file).stat().st_size > PARSED_BYTES for file in files.files
    )
