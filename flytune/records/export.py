"""The record of an export: every file as it was written."""

from flytune.records.contents import StoredFile
from flytune.schema import Record


class Export(Record):
    """export.json: every file of the exported folder as it was written."""

    files: list[StoredFile]
    """Relative to the exported folder."""
    base: str
    """recipe.model.name_or_path."""
    revision: str | None
    """The commit that the base model was loaded at; None for a folder."""
