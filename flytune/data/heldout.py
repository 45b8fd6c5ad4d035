"""Held-out samples of a prepared data set, in stored order, for scoring."""

from pathlib import Path

from flytune.data.rows import row_kind
from flytune.data.shards import AGAIN, read_manifest
from flytune.errors import DataError, PreparedDataError
from flytune.models import Row
from flytune.models.scoring import IGNORED


def heldout_rows(dataset: Path, limit: int) -> list[Row]:
    """Return the first `limit` held-out samples of a prepared data set, in stored order, with the columns of
    their kind of rows. None, if the recipe holds none out.

    Raises:
        DataError: the folder is incomplete, or its held-out part has no token to score.
    """
    import pyarrow.parquet

    rows: list[Row] = []
    manifest = read_manifest(dataset)
    columns = ["input_ids", "labels", *row_kind(manifest.row_kind).columns]
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
    has_labels = row_kind(manifest.row_kind).trains_labels
    if (
        has_labels
        and manifest.heldout.samples
        and not any(label != IGNORED for row in rows for label in row["labels"][1:])
    ):
        raise DataError(
            f"{dataset}: no held-out token to score; raise data.heldout_fraction or set data.heldout_path"
        )
    return rows


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
