"""Cells of tables of text that are most likely a missing value: programs write one as a word, and no reader
tells it from an answer."""

from collections.abc import Iterator, Sequence

from flytune.data.check import Check, judged
from flytune.data.columns import NamedRow
from flytune.data.formats import Chat, Plain, Sample
from flytune.data.sources import kind
from flytune.records import Manifest
from flytune.sentences import counted_of

_TABLES = ("csv", "tsv")
"""Kinds of files whose cells are text alone; others have null."""
_WORDS = ("na", "n/a", "#n/a", "<na>", "nan", "none", "null")


def cell_of(row: NamedRow, samples: Sequence[Sample]) -> str | None:
    """Return the first cell of a table's row that is such a word, and a text of its samples, or the end of
    one after the separator of instruction and input; None if there is none."""
    if kind(row.where.rpartition(":")[0]) not in _TABLES:
        return None
    cells = [cell for cell in row.values.values() if isinstance(cell, str) and cell.strip().lower() in _WORDS]
    texts = [text for sample in samples for text in _texts(sample)] if cells else []
    return next(
        (
            cell
            for cell in cells
            if any(text == cell or text.endswith(row.separator + cell) for text in texts)
        ),
        None,
    )


def _texts(sample: Sample) -> Iterator[str]:
    if isinstance(sample, Chat):
        yield from (message["content"] for message in sample.messages)
    elif isinstance(sample, Plain):
        yield from (sample.prompt, sample.completion or "")


def checks(manifest: Manifest) -> Iterator[Check]:
    """Say how many rows have such a cell, if any has."""
    if not manifest.missing:
        return
    yield judged(
        "missing values",
        manifest.missing,
        manifest.rows,
        f"{counted_of(manifest.missing, manifest.rows, 'row', 'has', 'have')} a cell that is NA, None, nan "
        f"or another word for a missing value, and is used as a text, the first at {manifest.first_missing}",
        "only warns",
        advice="remove these rows, unless the word is meant: pandas.read_csv reads it as missing, and dropna "
        "leaves such rows out",
    )
