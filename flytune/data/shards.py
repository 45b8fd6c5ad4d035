"""The stored form of a prepared data set: parquet shards of samples, or of blocks of them, and the
manifest."""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from tqdm import tqdm

from flytune.data.labels import Encoded
from flytune.data.packing import PackingWindow
from flytune.data.rows import row_kind
from flytune.errors import DataError, PreparedDataError
from flytune.files import sha256_of
from flytune.models import Row, tokenizers
from flytune.models.images import STORED, Processor, StoredImages
from flytune.models.scoring import CLASSES, IGNORED
from flytune.names import NameRefused, inside
from flytune.records import Manifest, Shard, SplitCounts
from flytune.schema import RecordError

MANIFEST = "manifest.json"
AGAIN = (
    "prepare the data again (a cached result: after `pyflyte local-cache clear`, on a cluster with "
    "--overwrite-cache)"
)
"""Advice about prepared data that is damaged."""
SAMPLES_A_SHARD = 100_000
TOKENS_A_SHARD = 20_000_000
_TOKENS_A_WRITE = 500_000


class SplitWriter:
    """Writer of one split below `folder`, one shard after the other, with about half a million tokens in
    memory.

    With `block_length` a row is a block of samples, with a column seq_lengths (see packing; its window is in
    memory as well); `columns` are further ones of its kind of rows (rows/base.py). Held-out samples have a
    column source, the index of their source in the manifest. `written` counts the complete shards of an
    earlier writer of the same split.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        block_length: int | None = None,
        written: SplitCounts | None = None,
        columns: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        import pyarrow

        ids = pyarrow.list_(pyarrow.int32())
        types = {"list": ids, "int": pyarrow.int32(), "text": pyarrow.string()}
        extra = {name: types[kind] for name, kind in columns.items()}
        if block_length:
            extra["seq_lengths"] = ids
        if split == "heldout":
            extra["source"] = pyarrow.int32()
        self._schema = pyarrow.schema({"input_ids": ids, "labels": ids, **extra})
        self._window = PackingWindow(block_length) if block_length else None
        self._folder, self._split = folder, split
        self._writer: Any = None
        self._pending: list[tuple[Any, ...]] = []
        self._pending_tokens = self._samples = self._tokens = 0
        written = written or SplitCounts(samples=0, tokens=0, trained_tokens=0, shards=[])
        self._shards = list(written.shards)
        self._trained = written.trained_tokens
        self._blocks = written.blocks or 0
        self._desirable = written.desirable or 0
        self._classes = Counter(dict(enumerate(written.classes)))
        (folder / split).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    @property
    def is_full(self) -> bool:
        """True if the current shard has reached its full size."""
        return self._samples >= SAMPLES_A_SHARD or self._tokens >= TOKENS_A_SHARD

    def add(self, sample: Encoded | tuple[Any, ...], source: int = 0) -> None:
        """Add a sample: input_ids and labels, lists or int32 arrays, and the values of `columns`; `source` is
        the index of its source in the manifest."""
        self._samples += 1
        self._tokens += len(sample[0])
        if self._split == "heldout":
            sample = (*sample, source)
        for row in [sample] if self._window is None else self._window.add(sample):
            self._add(row)

    def counts(self) -> SplitCounts:
        """End the current shard, whatever its size, and return the counts of all shards."""
        self._close()
        return SplitCounts(
            samples=sum(shard.samples for shard in self._shards),
            tokens=sum(shard.tokens for shard in self._shards),
            trained_tokens=self._trained,
            blocks=self._blocks if self._window else None,
            desirable=self._desirable if "label" in self._schema.names else None,
            classes=[self._classes[place] for place in range(max(self._classes, default=-1) + 1)],
            shards=list(self._shards),
        )

    def _close(self) -> None:
        import pyarrow

        for row in self._window.flush() if self._window else ():
            self._add(row)
        self._write()
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        sha256 = sha256_of(self._folder / self._file)
        self._shards.append(Shard(file=self._file, samples=self._samples, tokens=self._tokens, sha256=sha256))
        self._samples = self._tokens = 0
        pyarrow.default_memory_pool().release_unused()

    @property
    def _file(self) -> str:
        return f"{self._split}/{len(self._shards):05}.parquet"

    def _add(self, row: tuple[Any, ...]) -> None:
        self._pending.append(row)
        self._pending_tokens += len(row[0])
        if self._pending_tokens >= _TOKENS_A_WRITE:
            self._write()

    def _write(self) -> None:
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        if not self._pending:
            return
        if self._writer is None:
            self._writer = ParquetWriter(self._folder / self._file, self._schema)
        values = dict(zip(self._schema.names, zip(*self._pending, strict=True), strict=True))
        arrays = {name: _array(column) for name, column in values.items()}
        self._trained += int((numbers_of(arrays["labels"].values) != IGNORED).sum())
        self._desirable += sum(values.get("label", ()))
        self._classes.update(chain.from_iterable(values.get(CLASSES, ())))
        self._writer.write_table(pyarrow.Table.from_arrays(list(arrays.values()), schema=self._schema))
        self._blocks += len(self._pending)
        self._pending, self._pending_tokens = [], 0


def numbers_of(array: Any) -> Any:
    """Return an Arrow array of int32 without nulls as a NumPy array of the same memory; its to_numpy would
    import pandas."""
    import numpy

    return numpy.from_dlpack(array) if len(array) else numpy.zeros(0, numpy.int32)


def _array(column: Sequence[Any]) -> Any:
    """Return numbers, texts, or lists of numbers as an Arrow array."""
    import numpy
    import pyarrow

    if isinstance(column[0], int):
        return _as_arrow(numpy.array(column, dtype=numpy.int32))
    if isinstance(column[0], str):
        return _text_array(column)
    numbers = numpy.concatenate([numpy.asarray(row, dtype=numpy.int32) for row in column])
    offsets = numpy.cumsum([0, *map(len, column)], dtype=numpy.int32)
    return pyarrow.ListArray.from_arrays(_as_arrow(offsets), _as_arrow(numbers))


def _as_arrow(numbers: Any) -> Any:
    """Return a NumPy array of int32 as an Arrow array of the same memory; pyarrow.array would import
    pandas."""
    import pyarrow

    return pyarrow.Array.from_buffers(pyarrow.int32(), len(numbers), [None, pyarrow.py_buffer(numbers)])


def _text_array(texts: Sequence[str]) -> Any:
    """Return texts as an Arrow array."""
    import numpy
    import pyarrow

    encoded = [text.encode() for text in texts]
    offsets = numpy.cumsum([0, *map(len, encoded)], dtype=numpy.int32)
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"".join(encoded))]
    return pyarrow.Array.from_buffers(pyarrow.string(), len(encoded), buffers)


def load(folder: Path, split: str) -> Any:
    """Return one split (`train` or `heldout`) of a prepared data set as a memory-mapped `datasets.Dataset`.

    Its columns are input_ids and labels, lists of int32, equally long; if `train` is packed, also
    seq_lengths, the lengths of the samples in a row. The memory map is in the machine's temporary folder,
    under a hash of the content: the ranks of a node share it.

    Raises:
        DataError: the preparation never finished, or files are missing or were changed.
    """
    manifest = read_manifest(folder)
    counts = _counts(manifest, split)
    files = [folder / shard.file for shard in counts.shards]
    _verify(folder, manifest, counts)
    import pyarrow
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    content = hashlib.sha256("".join(shard.sha256 for shard in counts.shards).encode()).hexdigest()
    cache = Path(tempfile.gettempdir()) / "flytune-datasets" / content[:16]
    try:
        dataset = Dataset.from_parquet([str(file) for file in files], cache_dir=str(cache))
    except (DatasetGenerationError, pyarrow.ArrowException, OSError) as error:
        raise PreparedDataError(
            f"{folder}: a {split} shard cannot be read: {error.__cause__ or error}; {AGAIN}"
        ) from error
    if len(dataset) != counts.rows:
        kind = "samples" if counts.blocks is None else "blocks"
        raise PreparedDataError(
            f"{folder}: {len(dataset)} {split} {kind}, but the manifest has {counts.rows}; {AGAIN}"
        )
    return dataset


def content_hash(shards: Iterable[Shard]) -> str:
    """Return the manifest's content_sha256: the hash of the shards' names and hashes in order."""
    return hashlib.sha256("".join(f"{shard.file}:{shard.sha256}\n" for shard in shards).encode()).hexdigest()


def _verify(folder: Path, manifest: Manifest, counts: SplitCounts) -> None:
    """Compare the shards of a split with their hashes, and these with the manifest's own.

    Each process of a node reads them, at the same time: they are in the page cache then, which training reads
    from.
    """
    if content_hash((*manifest.train.shards, *manifest.heldout.shards)) != manifest.content_sha256:
        raise PreparedDataError(
            f"{folder / MANIFEST}: changed: its hashes are not those of content_sha256; {AGAIN}"
        )
    try:
        paths = [inside(folder, shard.file) for shard in counts.shards]
    except NameRefused as error:
        raise PreparedDataError(f"{folder}: {error}; {AGAIN}") from None
    missing = [shard.file for shard, file in zip(counts.shards, paths, strict=True) if not file.is_file()]
    if missing:
        raise PreparedDataError(f"{folder}: incomplete: {', '.join(missing)} missing; {AGAIN}")
    with ThreadPool(4) as pool:
        hashes = tqdm(
            pool.imap(sha256_of, paths), total=len(paths), desc="verifying the data", unit=" shards", delay=2
        )
        for shard, digest in zip(counts.shards, hashes, strict=True):
            if digest != shard.sha256:
                raise PreparedDataError(
                    f"{folder / shard.file}: its content is not what was prepared; {AGAIN}"
                )


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a prepared data set.

    Raises:
        DataError: there is none, so the preparation never finished; or it is not a valid manifest.
    """
    try:
        return Manifest.read(folder / MANIFEST)
    except FileNotFoundError:
        raise PreparedDataError(
            f"{folder}: no {MANIFEST}, so the preparation never finished; {AGAIN}"
        ) from None
    except RecordError as error:
        raise PreparedDataError(f"{folder / MANIFEST}: not a valid manifest ({error}); {AGAIN}") from None


def _counts(manifest: Manifest, split: str) -> SplitCounts:
    assert split in ("train", "heldout"), split
    counts: SplitCounts = getattr(manifest, split)
    return counts


def heldout_rows(dataset: Path, limit: int) -> list[Row]:
    """Return the first `limit` held-out samples of a prepared data set, in stored order, with the columns of
    their kind of rows; none if the recipe holds none out.

    Raises:
        DataError: the folder is incomplete, or its held-out part has no token to score.
    """
    import pyarrow.parquet

    rows: list[Row] = []
    manifest = read_manifest(dataset)
    kind = row_kind(manifest.row_kind)
    columns = ["input_ids", "labels", *kind.columns]
    for shard in manifest.heldout.shards:
        if len(rows) >= limit:
            break
        try:
            table = pyarrow.parquet.read_table(dataset / shard.file, columns=columns)
        except FileNotFoundError:
            raise PreparedDataError(
                f"{dataset}: {shard.file} is in manifest.json but not in the folder; {AGAIN}"
            ) from None
        except (pyarrow.ArrowException, OSError) as error:
            raise PreparedDataError(
                f"{dataset}: {shard.file} cannot be read ({' '.join(str(error).split())}); {AGAIN}"
            ) from None
        rows += table.slice(0, limit - len(rows)).to_pylist()
    if kind.has_images:
        stored = stored_images(dataset)
        rows = [row | {STORED: stored} for row in rows]
    # The first token of a sample is never scored.
    labels = (label for row in rows for label in row["labels"][1:])
    if kind.trains_labels and manifest.heldout.samples and all(label == IGNORED for label in labels):
        raise DataError(
            f"{dataset}: no held-out token to score; raise data.heldout_fraction or set data.heldout_path"
        )
    return rows


def stored_images(dataset: Path) -> StoredImages:
    """Return the images of a prepared data set."""
    max_pixels = read_manifest(dataset).max_pixels
    tokenizer = tokenizers.load(dataset / "tokenizer", PreparedDataError, AGAIN)
    return StoredImages(dataset, Processor(str(dataset / "tokenizer"), None, tokenizer, max_pixels))


def heldout_sources(dataset: Path, limit: int) -> list[str]:
    """Return the names of the sources of the rows that `heldout_rows` returns."""
    import pyarrow.parquet

    manifest = read_manifest(dataset)
    numbers: list[int] = []
    for shard in manifest.heldout.shards:
        if len(numbers) < limit:
            numbers += pyarrow.parquet.read_table(dataset / shard.file, columns=["source"])[
                "source"
            ].to_pylist()
    return [manifest.sources[number].name for number in numbers[:limit]]
