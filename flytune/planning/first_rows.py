"""The first rows of a recipe's local data, read and tokenized as the preparation does, so that a plan knows what it refuses."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from flytune.data import readers, sources, windows
from flytune.data.counts import Tally
from flytune.data.formats import check_columns
from flytune.data.process import Chunk, Sampler
from flytune.data.tokenizer import Encoder, check_rows, load_tokenizer
from flytune.errors import DataError
from flytune.models import config_files
from flytune.planning.sample_count import PARSED_BYTES
from flytune.recipe import DataRequest, Recipe, Source
from flytune.sentences import counted

ROWS = 256
"""Rows of each source that are read."""


def warnings(recipe: Recipe) -> list[str]:
    """Return what is doubtful about the first rows, a sentence for each source; empty if nothing is.

    Rows are rendered and tokenized where the base is a folder of this machine. For others, whose tokenizer would have to be
    fetched, columns and their content are read alone. Data of the hub, at addresses, and in files of each day is not read.

    Raises:
        DataError: as data.prepare: a row, the tokenizer or the template cannot be used, or none of all rows would be trained.
    """
    data, request = recipe.data, DataRequest.of(recipe, "plan")
    has_tokenizer = Path(recipe.model.name_or_path).expanduser().is_dir()
    tokenizer = None
    if has_tokenizer:
        loaded = load_tokenizer(recipe.model, data)
        check_rows(loaded, config_files.table_rows(recipe.model), recipe.model)
        tokenizer = Encoder(loaded)
    sampler = Sampler(request, tokenizer)
    told: list[str] = []
    keys = [key for key, source in data.all_sources.items() if _is_readable(source.path, f"{key}.path", source.exclude)]
    if data.heldout_key and _is_readable(data.heldout_path, data.heldout_key, []):
        keys.append(data.heldout_key)
    for key in keys:
        is_heldout = key == data.heldout_key
        source: Source = data if is_heldout else data.all_sources[key]
        check_columns(source.columns, "data" if is_heldout else key)
        found = readers.read_heldout(data) if is_heldout else readers.read(source, key)
        rows = list(islice(found if data.max_bad_fraction else readers.strict(found), ROWS + 1))
        first = rows[:ROWS]
        if not first:
            continue
        if tokenizer is None:
            _read(sampler, first, key, bool(data.max_bad_fraction))
            continue
        made = sampler.samples(Chunk(key, first, "", "", 1.0, False))
        if len(made.bad) == len(first):
            raise made.bad[0][1]
        told += _of_samples(made.tally, len(made.lengths), len(first), len(rows) > ROWS, source, data.max_length)
    return told


def _read(sampler: Sampler, rows: list[readers.Row], key: str, may_be_bad: bool) -> None:
    """Read rows without a tokenizer; raise the error of the first bad one, unless some may be bad and not all are."""
    form, errors = "", list[DataError]()
    for row in rows:
        try:
            form = sampler.form_of(row, form, key)
        except DataError as error:
            errors.append(error)
    if errors and (not may_be_bad or len(errors) == len(rows)):
        raise errors[0]


def _of_samples(tally: Tally, samples: int, rows: int, are_more: bool, source: Source, max_length: int) -> Iterator[str]:
    """Yield what is doubtful about the first rows of a source.

    Raises:
        DataError: none of them is trained, and there are no others.
    """
    longer = sum(count for length, count in tally.lengths.items() if length > max_length)
    which = f"{source.name}: {'the first ' if are_more else 'all '}{counted(rows, 'row')}"
    longest = f"data.max_length {max_length} (the longest has {counted(max(tally.lengths, default=0), 'token')})"
    if not samples:
        none = (
            f"{which}: none has a trained token: {longer:,} are longer than {longest}, in the others the answer is missing or "
            f"empty; {'raise data.max_length' if longer else 'give the rows answers'}"
        )
        if not are_more:
            raise DataError(none)
        yield none
    elif 2 * longer > rows:
        yield f"{which}: {longer:,} are longer than {longest}; raise it, or set data.too_long"


def _is_readable(path: str | None, key: str, exclude: list[str]) -> bool:
    """Return whether rows can be read here at once: not from the hub, an address, a volume of pods or a large JSON file."""
    if path is None or ("://" in path and not path.startswith("file://")) or windows.is_windowed(path):
        return False
    if not Path(path.removeprefix("file://")).expanduser().exists():
        return False
    files: Any = sources.locate(path, key, exclude)
    if files.saved:
        return True
    return not any(sources.kind(file) == "json" and Path(file).stat().st_size > PARSED_BYTES for file in files.files)
