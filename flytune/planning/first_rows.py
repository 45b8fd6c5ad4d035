"""The first rows of a recipe's local data, read and tokenized as the preparation does, so that a plan knows
what it refuses."""

from pathlib import Path

from flytune.data import readers, sources, windows
from flytune.data.counts import ends_of
from flytune.data.formats import check_columns
from flytune.data.preparation import refuse_undivided
from flytune.data.process import Chunk, Sampler, Samples
from flytune.data.tokenizer import Encoder, check_rows, load_tokenizer
from flytune.errors import DataError
from flytune.models import config_json, tensor_headers
from flytune.planning.sample_count import PARSED_BYTES, folder_bytes
from flytune.recipe import Data, DataRequest, Recipe, Source
from flytune.sentences import counted

ROWS = 256
"""Rows of each source that are read."""
_BECOMES = {"truncate": "cut", "drop": "dropped"}
"""Words for the treatment of longer rows, by data.too_long; those that are split are trained completely."""


def warnings(recipe: Recipe) -> list[str]:
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
    doubts = _of_weights(recipe)
    split_range: list[int] = []
    complete: list[Samples] = []
    for key, source in _readable(data).items():
        check_columns(source.columns, "data" if key == data.heldout_key else key)
        rows = list(readers.rows_of(data, key, most=ROWS + 1))
        first, are_all = rows[:ROWS], len(rows) <= ROWS
        which = f"{source.name}: {'all' if are_all else 'the first'} {counted(len(first), 'row')}"
        samples = sampler.samples(Chunk(key, first, "", "", 1.0, False))
        if samples.bad and len(samples.bad) == len(first):
            error = samples.bad[0][1]
            if are_all:
                raise error
            doubts.append(f"{which}: none can be used; {error}")
        elif tokenizer and first:
            doubts += _of_samples(samples, which, len(first), data)
            split_range = ends_of([*split_range, *samples.tally.split_range])
            complete += [samples] if are_all else []
    is_all = len(complete) == len(data.all_sources)
    count = sum(len(row) for samples in complete for row in samples.rows)
    if data.holds_out and is_all and count > 1 and len(set(split_range)) == 1:
        refuse_undivided(data, "held-out or no training", count)
    return doubts


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
            f"{counted(max(lengths), 'token')})"
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
