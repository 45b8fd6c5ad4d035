"""The folder of an export: its required files, its tokenizer, and export.json, the manifest, with the
progress of an export that is being written."""

import shutil
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from flytune.errors import ExportError
from flytune.files import sha256_of, written_atomically
from flytune.models import loading, tokenizers
from flytune.names import FileName
from flytune.recipe import Recipe
from flytune.records import Export
from flytune.records.contents import list_files
from flytune.schema import Record, RecordError, Strict


def trained_folder(recipe: Recipe, trained: Path) -> Path:
    """Return the folder of the weights that training wrote or that an artifact has, as the recipe's method
    stores them.

    Raises:
        ExportError: a required file is missing.
    """
    folder = loading.weights_folder(trained)
    config = "config.json" if recipe.method.name == "full" else "adapter_config.json"
    missing = [
        f"{folder.name}/{file}" for file in (config, "tokenizer_config.json") if not (folder / file).is_file()
    ]
    if not list(folder.glob("*.safetensors")):
        missing.append(f"{folder.name}/*.safetensors")
    if missing:
        raise ExportError(
            f"{trained}: not a complete {recipe.method.name} export: no {', '.join(missing)}; train again"
        )
    return folder


def tokenizer(folder: Path) -> Any:
    """Return the tokenizer of an exported folder.

    Raises:
        ExportError: it cannot be read.
    """
    return tokenizers.load(folder, advice="nothing was stored")


MANIFEST = "export.json"
"""File name of the manifest, written last: next to model/ or adapter/; in an artifact, next to the
weights."""
_PROGRESS = "export.partial.json"


class Written(Strict):
    """A complete file of weights."""

    sha256: str
    names: list[str]
    """Names of its tensors."""


class ExportProgress(Record):
    """export.partial.json: the complete files of weights, which a later export of the same weights does not
    write again."""

    weights: str | None = None
    """Identity of the weights; with None, no file is kept."""
    files: dict[FileName, Written] = Field(default={})

    @classmethod
    def of(cls, folder: Path, weights: str | None) -> Self:
        """Return the progress of an interrupted export into `folder`; remove incomplete files and those of
        other weights."""
        try:
            before = cls.read(folder.parent / _PROGRESS)
        except (FileNotFoundError, RecordError):
            return cls(weights=weights)
        files = before.files if weights and before.weights == weights else {}
        files = {file: done for file, done in files.items() if _is_complete(folder / file, done)}
        if not files:
            shutil.rmtree(folder, ignore_errors=True)
        for path in folder.glob("*"):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in files:
                path.unlink()
        return cls(weights=weights, files=files)

    def with_file(self, folder: Path, file: str, written: Written) -> Self:
        """Return the progress with one more complete file of `folder`, and store it."""
        progress = self.model_copy(update={"files": self.files | {file: written}})
        if self.weights:
            with written_atomically(folder.parent / _PROGRESS) as temporary:
                progress.write(temporary)
        return progress


def write_manifest(
    recipe: Recipe, folder: Path, revision: str | None, progress: ExportProgress | None = None
) -> None:
    """Write export.json next to `folder`, with every file's size and hash; files that `progress` has are not
    read again."""
    with written_atomically(folder.parent / MANIFEST) as temporary:
        make_manifest(recipe, folder, revision, progress).write(temporary)
    (folder.parent / _PROGRESS).unlink(missing_ok=True)


def make_manifest(
    recipe: Recipe, folder: Path, revision: str | None, progress: ExportProgress | None = None
) -> Export:
    """Return the manifest of an exported folder, as `write_manifest` stores it."""
    hashes = {file: done.sha256 for file, done in progress.files.items()} if progress else {}
    return Export(
        files=list_files(folder, hashes, "hashing the export"),
        base=recipe.model.name_or_path,
        revision=revision,
        quantized=recipe.method.quantized if recipe.method.name == "qlora" else None,
    )


def _is_complete(path: Path, written: Written) -> bool:
    return path.is_file() and sha256_of(path) == written.sha256
