"""export.json: the files of an export."""

from flytune.records.contents import StoredFile
from flytune.schema import Record


class Export(Record):
    """export.json: every file of the exported folder, as written."""

    files: list[StoredFile]
    """Files with paths relative to the exported folder."""
    base: str
    """The recipe's model.name_or_path."""
    revision: str | None
    """Commit of the base model; None for a folder."""
    quantized: str | None = None
    """Format of the base's weights in training (`nf4_double`, `int8` ...); None where they were not
    quantized."""
