"""The mixture of sources: their samples in turn, and the position that was reached in each source."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from tqdm import tqdm

from flytune.data.bad_rows import BadRows
from flytune.data.counts import Tally
from flytune.data.formats import check_columns
from flytune.data.process import Chunk, Samples, StoredSample, characters_of, shares
from flytune.data.progress import Position
from flytune.data.readers import Row, rows_of
from flytune.data.sources import size
from flytune.data.workers import Workers
from flytune.errors import DataError
from flytune.recipe import Data
from flytune.sentences import counted

_CHUNK_ROWS = 256
_CHUNK_CHARACTERS = 500_000
_MEASURED = 8
"""One row in this many is measured; its characters count for the others."""


class SourceStream:
    """The samples of one source, row by row, from a position on."""

    def __init__(self, key: str, data: Data, workers: Workers, tally: Tally, position: Position) -> None:
        self.key, self.tally, self.position = key, tally, position
        self._data, self._workers = data, workers
        self.is_heldout = key == data.heldout_key
        """True for held-out data of its own, which is read after all sources."""

    def rows(self, bad: BadRows, bar: "tqdm[Any]") -> Iterator[list[StoredSample]]:
        """Yield the samples of each row that has any; `position` is then after that row.

        Raises:
            DataError: as readers.read and Sampler.samples; or there are more bad rows than the recipe allows.
        """
        if self.is_heldout:
            check_columns(self._data.columns)
            passes = [1.0]
        else:
            source = self._data.all_sources[self.key]
            check_columns(source.columns, self.key)
            passes = shares(source.weight)
        for turn, share in enumerate(passes):
            if turn < self.position.turn:
                continue
            if turn > self.position.turn:
                self.position = Position(turn=turn)
            begin = self.position
            chunks = islice(self._chunks(turn, share, bar), begin.chunk, None)
            for number, samples in enumerate(self._workers.samples(chunks), begin.chunk):
                taken = begin.row if number == begin.chunk else 0
                if not taken:
                    self._count(samples, bad)
                for row, kept in enumerate(samples.rows[taken:], taken + 1):
                    self.position = Position(turn=turn, chunk=number, row=row)
                    yield kept
                self.position = Position(turn=turn, chunk=number + 1)
                bar.set_postfix_str(counted(self.tally.rows, "row"), refresh=False)
        self.position = self.position.model_copy(update={"is_done": True})

    def _chunks(self, turn: int, share: float, bar: "tqdm[Any]") -> Iterator[Chunk]:
        advance = bar.update if bar.unit == "B" else None
        for chunk in _chunked(rows_of(self._data, self.key, advance)):
            if advance is None:
                bar.update(len(chunk))
            yield Chunk(self.key, chunk, self.tally.form, self.tally.kind, share, turn > 0)

    def _count(self, samples: Samples, bad: BadRows) -> None:
        self.tally.add(samples.tally)
        bad.rows += samples.tally.rows
        for where, error in samples.bad:
            bad.add(where, error)
        bad.check(done=False)


Round = list[tuple[SourceStream, list[StoredSample]]]
"""The samples of one row of each source."""


def mixed(streams: list[SourceStream], bad: BadRows, bar: "tqdm[Any]") -> Iterator[Round]:
    """Yield one row of each source in turn, until all have ended; then the held-out rows.

    An evaluation may only use the first held-out samples: taken in turn, they are not all of one source.
    """
    yield from _in_turn([stream for stream in streams if not stream.is_heldout], bad, bar)
    yield from _in_turn([stream for stream in streams if stream.is_heldout], bad, bar)


def _in_turn(streams: list[SourceStream], bad: BadRows, bar: "tqdm[Any]") -> Iterator[Round]:
    waiting = {stream: stream.rows(bad, bar) for stream in streams if not stream.position.is_done}
    while waiting:
        taken = [(stream, next(rows, None)) for stream, rows in waiting.items()]
        for stream, kept in taken:
            if kept is None:
                del waiting[stream]
        yield [(stream, kept) for stream, kept in taken if kept is not None]


def bytes_of(data: Data) -> int | None:
    """Return the bytes to be read, counted once for each pass; None if unknown (the hub, `save_to_disk`)."""
    total = 0
    paths = [
        (source.path, f"{key}.path", source.exclude, len(shares(source.weight)))
        for key, source in data.all_sources.items()
    ]
    if data.heldout_key:
        paths.append((data.heldout_path, data.heldout_key, [], 1))
    for path, key, exclude, times in paths:
        if path is None or (size_there := size(path, key, exclude)) is None:
            return None
        total += times * size_there
    return total


def _chunked(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield lists of rows, always the same for the same rows; rows before an error are yielded before it is
    raised."""
    chunk: list[Row] = []
    characters = 0
    stopped: DataError | None = None
    try:
        for row in rows:
            if len(chunk) % _MEASURED == 0:
                characters += _MEASURED * characters_of(row[0])
            chunk.append(row)
            if len(chunk) >= _CHUNK_ROWS or characters >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
    except DataError as error:
        stopped = error
    if chunk:
        yield chunk
    if stopped is not None:
        raise stopped
