"""Local files and folders of a recipe, which pods do not have: finding them, their size, and replacing them
by addresses."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flytune import files, json_core
from flytune.cluster import folders
from flytune.data import harness_tasks, sources, windows
from flytune.errors import DataError, RecipeError
from flytune.hardware import load_cluster
from flytune.hardware.shapes import GIB
from flytune.mistakes import dotted
from flytune.models import base, initial_adapter, remote
from flytune.recipe import Recipe

LIMIT_GIB = 20.0
"""Upper limit of one submission's uploads, in GiB; the environment variable LIMIT_VARIABLE sets another
one."""
LIMIT_VARIABLE = "FLYTUNE_UPLOAD_GIB"
LARGEST_FILE_GIB = 5
"""Largest file that S3 takes by a signed address, in GiB."""

Location = tuple[int | str, ...]
Change = Callable[[Location, str, str], str]
"""Function of a path's place in the recipe, its field, and the path; it returns the replacement."""


class Local(NamedTuple):
    """One local file or folder."""

    field: str
    key: str
    """The recipe's dotted name for its place: data.sources[0].path of the field data.sources.path."""
    path: str
    """The path as the recipe has it."""
    name: str
    """The last part of its address."""
    files: dict[str, Path]
    """Files by name below the folder; a file alone is named by the empty text."""

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())


def found(content: Any, limit_gib: float = LIMIT_GIB, lacking: Sequence[str] = ()) -> list[Local]:
    """List all that the content of a recipe, or of a sweep's changes to one, names on this machine, each
    once.

    Raises:
        RecipeError: all mistakes at once: paths that do not exist, are not data or model, or are too large;
            and `lacking`, sentences on folders that pods lack.
    """
    locals_by_path: dict[tuple[str, str], Local] = {}
    problems = list(lacking)

    def note(loc: Location, field: str, path: str) -> str:
        if (field, path) not in locals_by_path:
            try:
                files = _files(content, loc, field, path)
                name = _plain(_place(_folder(field, path)).name)
                locals_by_path[field, path] = Local(
                    field, dotted(loc), path, name, _renamed(files, dotted(loc), field)
                )
            except (RecipeError, DataError, OSError) as error:
                problems.append(str(error))
        return path

    replaced(content, note)
    problems += _too_large(list(locals_by_path.values()), limit_gib)
    if problems:
        raise RecipeError.of("local files that pods would not have", problems)
    return list(locals_by_path.values())


def missing(recipe: Recipe) -> list[str]:
    """List what a recipe names on this machine and is not there, or cannot be what it should be, a sentence
    each."""
    problems: list[str] = []

    def note(loc: Location, field: str, path: str) -> str:
        place = _place(_folder(field, path))
        if windows.is_windowed(path) or (field in _OF_DATA and place.is_file() and sources.kind(path)):
            return path
        # Said without `sources.locate`, which imports the libraries of stores.
        if field in _OF_DATA and not place.exists():
            problems.append(f"{dotted(loc)}: {path}: no such file or folder{sources.beside(str(place))}")
        elif (
            field != "model.name_or_path" or not place.is_dir()
        ):  # a plan needs the config alone, and reads it
            try:
                _files(content, loc, field, path)
                problems.extend(_unused(content, loc, path) if field in _OF_DATA else ())
            except (RecipeError, DataError, OSError) as error:
                problems.append(str(error))
        return path

    content = of_recipe(recipe)
    replaced(content, note)
    return list(dict.fromkeys(problems))


def _files(content: Any, loc: Location, field: str, path: str) -> dict[str, Path]:
    """Return the files at a local path, by name below its folder; `loc` is its place in the recipe's
    content."""
    key = dotted(loc)
    return _data(path, key, _exclude(content, loc)) if field in _OF_DATA else _FIELDS[field](path, key)


def _folder(field: str, path: str) -> str:
    """Return a path, or the folder of its pattern."""
    return sources.divided_at_pattern(path)[0] if field in _OF_DATA else path


def _exclude(content: Any, loc: Location) -> list[str]:
    """Return what the source at a path's place leaves out; a sweep's changes may have the path alone."""
    for part in loc[:-1]:
        content = content[part]
    patterns = content.get("exclude") if isinstance(content, Mapping) and loc[-1] == "path" else None
    return list(patterns or ())


def _unused(content: Any, loc: Location, path: str) -> Iterator[str]:
    for pattern in sources.locate(path, dotted(loc), _exclude(content, loc)).unused:
        yield f"{dotted((*loc[:-1], 'exclude'))}: {pattern} matches nothing of {path}; remove it, or mend it"


def complete(path: str, key: str, limit_gib: float = LIMIT_GIB) -> Local:
    """Return a file or folder with all its content, given as an input of its own.

    Raises:
        RecipeError: it does not exist, or is too large.
    """
    place = _place(path)
    files = {"": place} if place.is_file() else harness_tasks.all_files(place)
    if not files:
        raise RecipeError(
            f"{key}: {path}: no such file, nor a folder of files (seen from {Path.cwd().name}/)"
        )
    local = Local(key, key, path, _plain(place.name), _renamed(files, key, key))
    if problems := list(_too_large([local], limit_gib)):
        raise RecipeError.of("local files that pods would not have", problems)
    return local


def replaced(content: Any, change: Change, loc: Location = ()) -> Any:
    """Return the content with `change` made to each local path in it."""
    if isinstance(content, str):
        # A sweep's changes are lists of such content, and its grid has a list for each field.
        field = re.sub(r"\[\d+\]", "", dotted(loc)).lstrip(".")
        return change(loc, field, content) if field in _FIELDS and is_local(field, content) else content
    if isinstance(content, Mapping):
        return {key: replaced(value, change, (*loc, key)) for key, value in content.items()}
    if isinstance(content, list):
        return [replaced(value, change, (*loc, index)) for index, value in enumerate(content)]
    return content


def of_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the content of a recipe that is uploaded: without a folder of tasks, where no task is asked."""
    content = recipe.model_dump()
    if not recipe.evaluation.tasks:
        content["evaluation"]["include_path"] = None
    return content


def refuse(recipe: Recipe, where: str) -> None:
    """Refuse local paths where nothing uploads them, and folders that pods do not have.

    Raises:
        RecipeError: the recipe has some.
    """
    problems: list[str] = []

    def note(loc: Location, field: str, path: str) -> str:
        problems.append(
            f"{dotted(loc)}: {path}: a path of this machine, which no pod has; name an address (s3://...)"
        )
        return path

    replaced(of_recipe(recipe), note)
    problems += folders.problems(recipe, load_cluster(), recipe.hardware.shape, uploaded=False)
    if problems:
        raise RecipeError.of(where, problems)


def refuse_absent(recipe: Recipe) -> None:
    """Refuse paths that are not in this pod: only `pyflyte run` uploads local files, with the recipe.

    Raises:
        RecipeError: the recipe has some.
    """
    problems: list[str] = []

    def note(loc: Location, field: str, path: str) -> str:
        place = _place(_folder(field, path))
        in_code = field == "evaluation.include_path" and (harness_tasks.ROOT / path).exists()
        if not (place.exists() or in_code):
            todo = "write an address (s3://...), or a path on a volume of cluster.yaml"
            problems.append(f"{dotted(loc)}: {path}: no such file or folder in the pod; {todo}")
        return path

    replaced(of_recipe(recipe), note)
    if problems:
        where = (
            "`pyflyte run` uploads the files of a recipe, and a run from the console or of a schedule "
            "uploads none"
        )
        raise RecipeError.of(f"recipe {recipe.name} ({where})", problems)


def is_local(field: str, path: str) -> bool:
    """Return whether it is a path of this machine: no address, no id of the hub, and not on a volume that
    pods mount."""
    if "://" in path and not path.startswith("file://"):
        return False
    if field == "data.chat_template" and path in sources.shipped_templates():
        return False
    place = _place(path)
    if load_cluster().has_mounted(str(place)):
        return False
    if field != "model.name_or_path" or place.is_dir():
        return True
    return base.is_path(path)


def _place(path: str) -> Path:
    return Path(os.path.abspath(Path(path.removeprefix("file://")).expanduser()))


def _too_large(uploads: list[Local], limit_gib: float) -> Iterator[str]:
    for upload in uploads:
        for name, file in upload.files.items():
            if file.stat().st_size > LARGEST_FILE_GIB * GIB:
                shown = f"{upload.path}/{name}".rstrip("/")
                yield (
                    f"{upload.key}: {shown}: {_gib(file.stat().st_size)}, and a file that is uploaded has "
                    f"{LARGEST_FILE_GIB} GiB at most; copy it to an address that pods can read (s3://...), "
                    "and name that"
                )
    if (total := sum(upload.size for upload in uploads)) > limit_gib * GIB:
        parts = ", ".join(f"{upload.key} {upload.path} ({_gib(upload.size)})" for upload in uploads)
        yield (
            f"{_gib(total)} to upload, and the limit is {limit_gib:g} GiB: {parts}; copy them to an address "
            f"that pods can read (s3://...), or set {LIMIT_VARIABLE}={int(total / GIB) + 1}"
        )


def _gib(size: int) -> str:
    return f"{size / GIB:.3g} GiB"


def _model(path: str, key: str) -> dict[str, Path]:
    folder = _place(path)
    if not folder.is_dir():
        raise RecipeError(
            f"{key}: {path}: no such folder (seen from {Path.cwd().name}/), and no hub id of the form "
            "owner/name"
        )
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    if "config.json" not in names:
        raise RecipeError(
            f"{key}: {path}: no config.json there; it holds {', '.join(names[:8]) or 'nothing'}"
        )
    index = files.read_regular(folder / remote.INDEX, json_core.LARGEST) if remote.INDEX in names else None
    wanted = [
        *remote.files_to_fetch(names, index, code=True, where=f"{key}: {path}"),
        *({"README.md"} & set(names)),
    ]
    return {name: folder / name for name in dict.fromkeys(wanted)}


def _data(path: str, key: str, exclude: Sequence[str] = ()) -> dict[str, Path]:
    try:
        place = sources.locate(path, key, exclude)
    except DataError as error:
        if windows.is_windowed(path):
            raise RecipeError(
                f"{key}: {path}: a file for each day is looked for by pods, at an address (s3://...)"
            ) from error
        raise
    if len(place.files) == 1 and place.labels == [path]:
        return {"": Path(place.files[0])}
    root = _place(sources.divided_at_pattern(path)[0])
    return {str(_place(file).relative_to(root)): Path(file) for file in place.files}


def _template(path: str, key: str) -> dict[str, Path]:
    sources.read_chat_template(path)
    return {"": _place(path)}


def _adapter(path: str, key: str) -> dict[str, Path]:
    folder = _place(path)
    files = {name: folder / name for name in (initial_adapter.CONFIG, initial_adapter.WEIGHTS)}
    if lacking := [name for name, file in files.items() if not file.is_file()]:
        raise RecipeError(
            f"{key}: {path}: no {' and no '.join(lacking)} there; name the artifact of an adapter"
        )
    return files


def _tasks(path: str, key: str) -> dict[str, Path]:
    try:
        return harness_tasks.files(harness_tasks.local_folder(path.removeprefix("file://")))
    except FileNotFoundError as error:
        raise RecipeError(f"{key}: {path}: {error}") from None


def _plain(name: str) -> str:
    """Return the name as an address can hold it."""
    return re.sub(r"[^\w.=+/-]", "_", name, flags=re.ASCII)


def _renamed(files: dict[str, Path], key: str, field: str) -> dict[str, Path]:
    renamed = {_plain(name): file for name, file in files.items()}
    odd = [name for name in files if name != _plain(name)]
    if len(renamed) < len(files) or (odd and field == "evaluation.include_path"):
        raise RecipeError(
            f"{key}: {', '.join(odd[:8])}: names that no address can hold; use letters, digits, dots and "
            "dashes"
        )
    return renamed


_FIELDS: dict[str, Callable[[str, str], dict[str, Path]]] = {
    "model.name_or_path": _model,
    "data.path": _data,
    "data.sources.path": _data,
    "data.heldout_path": _data,
    "data.chat_template": _template,
    "method.adapter": _adapter,
    "evaluation.include_path": _tasks,
}
"""Fields that name local files, without positions in lists, and how the files are found."""
_OF_DATA = ("data.path", "data.sources.path", "data.heldout_path")
