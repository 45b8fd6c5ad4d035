"""What an export has written: the manifest beside it, and the files that are whole while it is under way."""

import shutil
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError

from flytune.files import sha256_of, written_atomically
from flytune.recipe.recipe import Recipe
from flytune.records.contents import StoredFile
from flytune.records.export import Export
from flytune.schema import Record, Strict

MANIFEST = "export.json"
"""Beside model/ or adapter/, written last; in an artifact, whose root is that folder, among its files."""
_PROGRESS = "export.partial.json"


class Written(Strict):
    """A file of weights that is whole."""

    sha256: str
    names: list[str]
    """Of its tensors."""


class Progress(Record):
    """export.partial.json: files of weights that are whole; read again by an export of the same weights."""

    weights: str | None = None
    """Says what the weights are; None keeps no file."""
    files: dict[str, Written] = Field(default={})

    @classmethod
    def of(cls, folder: Path, weights: str | None) -> Self:
        """Where an export into `folder` that was cut off stands; what it left of other weights, or not whole, is removed."""
        try:
            before = cls.read(folder.parent / _PROGRESS)
        except (FileNotFoundError, ValidationError):
            return cls(weights=weights)
        files = before.files if weights and before.weights == weights else {}
        files = {file: done for file, done in files.items() if _is_whole(folder / file, done)}
        if not files:
            shutil.rmtree(folder, ignore_errors=True)
        for path in folder.glob("*"):
            if path.name not in files:
                path.unlink()
        return cls(weights=weights, files=files)

    def after(self, folder: Path, file: str, written: Written) -> Self:
        """With one more file of `folder`."""
        made = self.model_copy(update={"files": self.files | {file: written}})
        if self.weights:
            with written_atomically(folder.parent / _PROGRESS) as temporary:
                made.write(temporary)
        return made


def seal(recipe: Recipe, folder: Path, revision: str | None, progress: Progress | None = None) -> None:
    """Writes export.json beside `folder`: every file in it with size and hash; those that `progress` knows are not read."""
    with written_atomically(folder.parent / MANIFEST) as temporary:
        listed(recipe, folder, revision, progress).write(temporary)
    (folder.parent / _PROGRESS).unlink(missing_ok=True)


def listed(recipe: Recipe, folder: Path, revision: str | None, progress: Progress | None = None) -> Export:
    """What `seal` writes."""
    known = {file: done.sha256 for file, done in progress.files.items()} if progress else {}
    files = [
        StoredFile(
            file=path.relative_to(folder).as_posix(),
            size=path.stat().st_size,
            sha256=known.get(path.name) or sha256_of(path),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    return Export(files=files, base=recipe.model.name_or_path, revision=revision)


def _is_whole(path: Path, written: Written) -> bool:
    return path.is_file() and sha256_of(path) == written.sha256
