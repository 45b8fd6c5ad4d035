"""Files to rows, one at a time: JSON Lines, JSON, CSV, text, Parquet, Arrow, and folders of
`datasets.save_to_disk`.

`datasets` 5 writes columns of mixed types as `extension<arrow.json>`, whose values are text.
"""

import bz2
import csv
import gzip
import io
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import chain, islice
from typing import Any

from flytune import json_core, names
from flytune.data.hub import hub_rows
from flytune.data.sources import TEXT_KINDS, Files, kind, locate
from flytune.errors import DataError
from flytune.files import open_regular
from flytune.json_core import JSONError
from flytune.recipe import Data, Source
from flytune.sentences import counted
from flytune.storage import Storage

Decode = Callable[[Any], Any]


def json_decoders(schema: Any) -> dict[str, Decode]:
    """Return a function for each column of a pyarrow schema that has JSON, which returns a value with the
    JSON parsed."""
    decoders = {field.name: _json_decoder(field.type) for field in schema}
    return {name: decode for name, decode in decoders.items() if decode is not None}


def decoded_json(row: dict[str, Any], columns: dict[str, Decode], where: str) -> dict[str, Any] | DataError:
    """Return a row with the JSON of `columns` parsed, or the error of one that is not JSON."""
    decoded = dict(row)
    for name, decode in columns.items():
        try:
            decoded[name] = decode(row.get(name))
        except json_core.JSONError as error:
            return DataError(f"{where}: column {name} has the type JSON, and a value that is not: {error}")
    return decoded


def _json_decoder(kind: Any) -> Decode | None:
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: None if value is None else json_core.load(value)
    if types.is_struct(kind):
        fields = json_decoders(kind)
        return (lambda value: _of_struct(value, fields)) if fields else None
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    inner = _json_decoder(kind.value_type) if is_list else None
    return (lambda value: value and [inner(item) for item in value]) if inner else None


def _of_struct(value: Any, fields: dict[str, Decode]) -> Any:
    return value and {name: fields[name](item) if name in fields else item for name, item in value.items()}


Row = tuple[dict[str, Any] | DataError, str]
"""Values by column, or the error of a row that cannot be read; and its location: `train.jsonl:4127`."""
Advance = Callable[[int], object]
"""Callback for the number of bytes that were read since its last call, of the files as they are stored."""
_EXCERPT = 80
LARGEST_LINE = 20_000_000
"""Bytes of a line of JSON Lines or CSV; process.LARGEST_ROW limits the text of a row."""
LARGEST_JSON = 2**30
"""Bytes of a JSON file that is not JSON Lines."""
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
"""Characters that separate columns of CSV."""
_MOST_SKIPPED = 10 * LARGEST_LINE
_TOO_LONG = f"more than {LARGEST_LINE:,} bytes; divide the row into several"


def read(source: Source, key: str = "data", advance: Advance | None = None) -> Generator[Row, None, None]:
    """Yield the rows of one source of a recipe, in order; at most `max_samples` of them if it is set.

    JSON Lines, CSV and Parquet are streamed; a JSON file is read completely. `key` is the source's key in the
    recipe. Closing the generator closes the file that it reads.

    Raises:
        DataError: the source does not exist, or a file of it is damaged; the message has the location.
    """
    if source.dataset_name is not None:
        rows: Iterator[Row] = (
            (_without_absent_keys(row), where) for row, where in hub_rows(source, source.dataset_name, key)
        )
    else:
        rows = read_path(str(source.path), f"{key}.path", source, advance, source.exclude)
    yield from islice(rows, source.max_samples)


def rows_of(
    data: Data, key: str, advance: Advance | None = None, most: int | None = None
) -> Generator[Row, None, None]:
    """Yield the rows of a source of a recipe, or of held-out data of its own, by their key in the recipe; at
    most `most` of them. Those that cannot be read are errors, where data.max_bad_fraction allows some.

    Raises:
        DataError: as `read`; or no row may be bad, and one cannot be read.
    """
    stored = _heldout(data, advance) if key == data.heldout_key else read(data.all_sources[key], key, advance)
    with closing(stored):
        rows = islice(stored, most)
        yield from rows if data.max_bad_fraction else strict(rows)


def _heldout(data: Data, advance: Advance | None) -> Generator[Row, None, None]:
    if data.heldout_path is not None:
        yield from read_path(data.heldout_path, "data.heldout_path", data, advance)
        return
    for row, where in hub_rows(data, str(data.dataset_name), split=data.eval_split):
        yield _without_absent_keys(row), where


def read_path(
    path: str,
    key: str,
    source: Source | None = None,
    advance: Advance | None = None,
    exclude: Sequence[str] = (),
) -> Iterator[Row]:
    """Yield the rows of all files at `path` apart from those to `exclude`; `key` is the recipe's name for it.

    `source` says how a saved DatasetDict and text files are read; by default the split train, and lines.
    """
    files = locate(path, key, exclude)
    if files.saved:
        split = source.dataset_split if source else "train"
        yield from ((_without_absent_keys(row), where) for row, where in rows_of_saved(path, split, key))
        return
    for file, label in zip(files.files, files.labels, strict=True):
        yield from _file(files, file, label, advance, source.sample_by if source else "line")


def strict(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the same rows.

    Raises:
        DataError: a row cannot be read; the message has the number of such rows in its file.
    """
    for row, where in rows:
        if isinstance(row, DataError):
            raise DataError(
                f"{row}{_others(_bad_rows_after(rows, where), 'item' if ', item ' in where else 'line')}"
            )
        yield row, where


def _bad_rows_after(rows: Iterator[Row], where: str) -> int:
    """Count the unreadable rows after one, in its file."""
    file, count = re.sub(r"\d+$", "", where), 0
    with suppress(DataError):  # later damage to the file; the first bad row is reported
        for row, location in rows:
            if not location.startswith(file):
                break
            count += isinstance(row, DataError)
    return count


def _file(source: Files, file: str, label: str, advance: Advance | None, sample_by: str) -> Iterator[Row]:
    name = str(kind(file))
    reader = partial(_text, sample_by) if name == "text" else _READERS[name]
    try:
        is_local = "file" in source.filesystem.protocol
        with open_regular(file) if is_local else source.filesystem.open(file, "rb") as stored:
            content = _decompressed(stored, file, is_local)
            position = 0
            for number, row in enumerate(reader(content, label)):
                if advance is not None and number % 64 == 0:
                    before, position = position, max(position, stored.tell())
                    advance(position - before)
                yield row
            if advance is not None:
                advance(max(0, stored.tell() - position))
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{label}: cannot be read: {error}") from None


def _decompressed(stored: Any, name: str, is_local: bool) -> Any:
    """Return the content of an open file, by the suffix of its name."""
    suffix = name.lower().rpartition(".")[2]
    if suffix == "gz":
        return gzip.GzipFile(fileobj=stored)
    if suffix == "bz2":
        return bz2.BZ2File(stored)
    if suffix == "xz":
        return lzma.LZMAFile(stored)
    if suffix == "zst":
        import pyarrow

        return io.BufferedReader(
            pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, mode="r"), "zstd"), 1 << 16
        )
    # Files of fsspec's addresses have a readline without a limit.
    return io.BufferedReader(stored, 1 << 20) if suffix in TEXT_KINDS and not is_local else stored


def _json_lines(file: Any, label: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(file), 1):
        where = f"{label}:{number}"
        if line is None:
            yield DataError(f"{where}: {_TOO_LONG}"), where
            continue
        row, mistake = _object(line)
        if mistake:
            yield DataError(f"{where}: {mistake}: {_excerpt(line)}"), where
        elif row is not None:
            yield row, where


def _lines(file: Any) -> Iterator[bytes | None]:
    """Yield each line; None in the place of one that is longer than LARGEST_LINE, which is never in memory
    completely.

    Raises:
        OSError: a line is so long that the file has no lines.
    """
    while line := file.readline(LARGEST_LINE + 1):
        if len(line) <= LARGEST_LINE:
            yield line
            continue
        skipped = len(line)
        while line and not line.endswith(b"\n"):
            line = file.readline(LARGEST_LINE)
            skipped += len(line)
            if skipped > _MOST_SKIPPED:
                raise OSError(f"a line of more than {_MOST_SKIPPED:,} bytes; write one row a line")
        yield None


def _object(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """Return the object on a line (None on a blank one), or a description of the line's mistake."""
    if not line.strip():
        return None, ""
    try:
        value = json_core.load(line.rstrip(b" \t\r\n"), LARGEST_LINE)
    except JSONError as error:
        return None, error.message if error.message.startswith("not UTF-8") else f"not JSON: {error}"
    return (value, "") if isinstance(value, dict) else (None, f"not a JSON object but {_type_name(value)}")


def _json(file: Any, label: str) -> Iterator[Row]:
    content = file.read(LARGEST_JSON + 1)
    if len(content) > LARGEST_JSON:
        raise DataError(
            f"{label}: more than {LARGEST_JSON:,} bytes, and a JSON file is read completely; write JSON Lines"
        )
    try:
        value = json_core.load(content, LARGEST_JSON)
    except JSONError as error:
        if error.message == "Extra data":  # JSON Lines in a .json file, as in many data sets
            yield from _json_lines(io.BytesIO(content), label)
            return
        if not error.line:
            reason = error.message if error.message.startswith("not UTF-8") else f"not JSON: {error.message}"
            raise DataError(f"{label}: {reason}") from None
        line = content.split(b"\n")[error.line - 1]
        raise DataError(
            f"{label}:{error.line}: not JSON: {error.message} at column {error.column}: {_excerpt(line)}"
        ) from None
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        if len(lists) != 1:
            raise DataError(
                f"{label}: a JSON file must be a list of objects, or an object with one such list; "
                f"found an object with {counted(len(lists), 'list')}, its keys are "
                f"{', '.join(value) or 'none'}"
            )
        value = lists[0]
    if not isinstance(value, list):
        raise DataError(
            f"{label}: a JSON file must be a list of objects, or an object with one such list; found "
            f"{_type_name(value)}"
        )
    for number, item in enumerate(value, 1):
        where = f"{label}, item {number}"
        if isinstance(item, dict):
            yield item, where
        else:
            yield DataError(f"{where}: not an object but {_type_name(item)}: {item!r:.80}"), where


def _text(sample_by: str, file: Any, label: str) -> Iterator[Row]:
    """Yield the lines of a text file that are not empty, its paragraphs, or its whole text."""
    text, first, size = list[str](), 1, 0
    lines = _text_lines(file, label)
    number = 0
    while True:
        try:
            line = next(lines, None)
        except UnicodeDecodeError as error:
            raise _not_utf8(error, f"{label}:{number + 1}") from None
        number += 1
        is_end = line is None or sample_by == "line" or (sample_by == "paragraph" and not line.strip())
        text += [] if line is None else [line]
        size += len(line or "")
        if size > LARGEST_LINE:
            raise DataError(
                f"{label}:{first}: a {sample_by} of more than {LARGEST_LINE:,} characters; divide it into "
                "several"
            )
        if is_end:
            if sample := "".join(text).strip("\r\n"):
                yield {"text": sample}, f"{label}:{first}"
            text, first, size = [], number + 1, 0
        if line is None:
            return


def _not_utf8(error: UnicodeDecodeError, where: str) -> DataError:
    return DataError(f"{where}: not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}")


def _delimiter(header: str) -> str:
    """Return the character that divides a header into the most columns; a comma if several do."""
    columns = {mark: len(next(csv.reader([header], delimiter=mark), ())) for mark in _DELIMITERS}
    return max(columns, key=lambda mark: columns[mark])


def _csv(file: Any, label: str) -> Iterator[Row]:
    csv.field_size_limit(LARGEST_LINE)
    lines = _text_lines(file, label)
    try:
        first = next(lines, "")
        mark = _delimiter(first) if kind(label) != "tsv" else "\t"
    except UnicodeDecodeError as error:
        raise _not_utf8(error, f"{label}:1") from None
    except csv.Error as error:
        raise DataError(f"{label}:1: not CSV: {error}") from None
    by = "" if mark == "," else f" (columns are separated by {_DELIMITERS[mark]})"
    reader = csv.DictReader(chain([first], lines), strict=True, delimiter=mark)
    try:
        names = list(reader.fieldnames or ())
        _refuse_duplicates(names, f"{label}:1")
        for row in reader:
            where = f"{label}:{reader.reader.line_num}"
            if None in row or None in row.values():
                cells = sum(value is not None for key, value in row.items() if key is not None) + len(
                    row.get(None, ())
                )
                yield (
                    DataError(
                        f"{where}: {counted(cells, 'cell')}, but the header has "
                        f"{len(reader.fieldnames or ())}{by}"
                    ),
                    where,
                )
            else:
                yield row, where
    except csv.Error as error:
        raise DataError(f"{label}:{reader.reader.line_num}: not CSV: {error}{by}") from None
    except UnicodeDecodeError as error:
        raise _not_utf8(error, f"{label}:{reader.reader.line_num + 1}") from None


def _text_lines(file: Any, label: str) -> Iterator[str]:
    for number, line in enumerate(_lines(file), 1):
        if line is None:
            raise DataError(f"{label}:{number}: {_TOO_LONG}")
        yield line.decode("utf-8-sig")


def _rows_of(batch: Any) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a record batch; None in the place of one that has more bytes than a line may have."""
    if batch.nbytes <= LARGEST_LINE:
        yield from batch.to_pylist()
        return
    for number in range(batch.num_rows):
        row = batch.slice(number, 1)
        yield row.to_pylist()[0] if row.nbytes <= LARGEST_LINE else None


def _placed(row: dict[str, Any] | None, where: str, json_columns: dict[str, Decode]) -> Row:
    if row is None:
        return DataError(f"{where}: {_TOO_LONG}"), where
    return decoded_json(_without_absent_keys(row), json_columns, where), where


def _parquet(file: Any, label: str) -> Iterator[Row]:
    from pyarrow import parquet

    number = 0
    try:
        opened = parquet.ParquetFile(file, page_checksum_verification=True)
        _refuse_duplicates(opened.schema_arrow.names, label)
        json_columns = json_decoders(opened.schema_arrow)
        # Some rows at a time: a value that is stored once and named by all rows would be in memory as often.
        for batch in opened.iter_batches(batch_size=32):
            for row in _rows_of(batch):
                number += 1
                yield _placed(row, f"{label}, row {number}", json_columns)
    except (OSError, DataError):
        raise
    except (
        Exception
    ) as error:  # damage shows in many ways: Arrow's errors, bytes that are not UTF-8, numbers out of range
        raise DataError(
            f"{label}: a damaged Parquet file: {' '.join(str(error).split())} (after row {number})"
        ) from error


def _arrow(file: Any, label: str) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        opened = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
        _refuse_duplicates(opened.schema.names, label)
        json_columns = json_decoders(opened.schema)
        batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
        for batch in batches:
            batch.validate(full=True)  # wrong offsets would end the process
            for start in range(0, batch.num_rows, 32):
                for row in _rows_of(batch.slice(start, 32)):
                    number += 1
                    yield _placed(row, f"{label}, row {number}", json_columns)
    except (OSError, DataError):
        raise
    except Exception as error:  # as above
        raise DataError(
            f"{label}: a damaged Arrow file: {' '.join(str(error).split())} (after row {number})"
        ) from error


_READERS = {
    "json lines": _json_lines,
    "json": _json,
    "csv": _csv,
    "tsv": _csv,
    "parquet": _parquet,
    "arrow": _arrow,
}
"""Readers by the kind of a file (sources.KINDS); of text, see _file."""


def _refuse_duplicates(names: list[str], where: str) -> None:
    """Refuse two columns of one name: the last one would hide the others."""
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        places = " and ".join(islice((str(at) for at, name in enumerate(names, 1) if name == twice), 10))
        raise DataError(f"{where}: the column {twice!r:.60} is there twice, as columns {places}; keep one")


def _without_absent_keys(row: dict[str, Any]) -> dict[str, Any]:
    """Remove null values inside a row's columns: Arrow gives each nested object the keys of all others, with
    null values."""
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(item) for item in value]
    return value


def _type_name(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null", dict: "an object"}
    return names.get(type(value), "a number")


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return text if len(text) <= _EXCERPT else text[: _EXCERPT - 3] + "..."


def _others(count: int, what: str) -> str:
    if not count:
        return ""
    return (
        f" ({count} other {what} of this file is bad as well)"
        if count == 1
        else f" ({count} other {what}s of this file are bad as well)"
    )


_LARGEST_STATE = 10_000_000
"""Bytes of state.json and dataset_dict.json."""


def rows_of_saved(path: str, split: str, key: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a saved data set, or of a split of several, with their places; `key` is the recipe's
    name for it.

    Raises:
        DataError: it is damaged, has no such split, or names files elsewhere.
    """
    import datasets

    _check_names_of_saved(path, key)
    try:
        saved = datasets.load_from_disk(path)
    except Exception as error:  # an incomplete folder raises errors of Arrow or JSON, or a KeyError
        raise DataError(
            f"{path}: looks like datasets.save_to_disk but cannot be read: {type(error).__name__}: {error}"
        ) from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise DataError(f"{path}: no split {split}; set data.dataset_split to one of {', '.join(saved)}")
        saved = saved[split]
    saved = saved.with_format(None)  # it may have been saved with one, as tensors or with columns left out
    leave_encoded(saved.info.features)
    number = 0
    try:
        saved.data.table.validate(full=True)  # wrong offsets would end the process
        for number, row in enumerate(saved, 1):
            yield row, f"{path}, row {number}"
    except Exception as error:  # as above
        raise DataError(
            f"{path}: a damaged data set: {' '.join(str(error).split())} (after row {number})"
        ) from error


def _check_names_of_saved(path: str, key: str) -> None:
    """Refuse a folder whose records name files elsewhere: datasets would read them."""
    storage = Storage(path, key, error=DataError, failed="cannot be read", retry=False)
    try:
        splits = [
            f"{names.check(str(split))}/"
            for split in _record_of_saved(storage, "dataset_dict.json").get("splits", [])
        ]
        for folder in splits or [""]:
            state = _record_of_saved(storage, f"{folder}state.json")
            for field in ("_data_files", "_indices_data_files"):
                for file in state.get(field) or []:
                    names.check(file["filename"])
    except names.NameRefused as error:
        raise DataError(f"{path}: names a file that is not in it: {error}") from None
    except (json_core.JSONError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: looks like datasets.save_to_disk but cannot be read: {error}") from None


def _record_of_saved(storage: Storage, name: str) -> dict[str, Any]:
    try:
        return json_core.load_object(storage.read(name, largest=_LARGEST_STATE))
    except FileNotFoundError:  # datasets says what is missing
        return {}


def leave_encoded(feature: Any) -> None:
    """Keep images and sounds of rows as they are stored: decoding one opens the path or the address that a
    row names.

    JSON is text there, and is parsed.
    """
    if isinstance(feature, dict):
        for part in feature.values():
            leave_encoded(part)
    elif isinstance(feature, list | tuple):
        for part in feature:
            leave_encoded(part)
    elif (inner := getattr(feature, "feature", None)) is not None:
        leave_encoded(inner)
    elif getattr(feature, "decode", None) is True and type(feature).__name__ != "Json":
        feature.decode = False
