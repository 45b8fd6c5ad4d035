"""A recipe's own tasks of lm-evaluation-harness: their folder, their YAML, and the files that they name as data."""

import re
from pathlib import Path
from typing import Any

from flytune import yaml_core
from flytune.errors import RecipeError
from flytune.models import remote
from flytune.recipe.sections import Evaluation

ROOT = Path(__file__).resolve().parents[3]
"""Root of what travels with the code, in pods as on a laptop."""
CARRIED = "_data_files"
"""The folder beside an uploaded task for those of its data_files that were elsewhere."""


def loader(upstream: Any, base_dir: Path, *, resolve_funcs: bool) -> Any:
    """Return the loader of a YAML file in `base_dir`."""
    from lm_eval.tasks import _yaml_loader

    if base_dir.is_relative_to(Path(_yaml_loader.__file__).parent):
        return upstream(base_dir, resolve_funcs=resolve_funcs)
    own: Any = type("Loader", (yaml_core.CoreLoader,), {})
    own.add_constructor("!function", _yaml_loader._mk_function_ctor(base_dir, resolve_funcs))
    return own


def folder(evaluation: Evaluation) -> Path | None:
    """Return the recipe's folder of tasks, fetched where it is at an address; None where it names none.

    Raises:
        RecipeError: there is none.
        StorageError: its storage is away.
    """
    if evaluation.include_path is None:
        return None
    if "://" in evaluation.include_path:
        return remote.fetch_folder(evaluation.include_path, "evaluation.include_path")
    return local_folder(evaluation.include_path)


def local_folder(include_path: str) -> Path:
    """Return the recipe's folder of tasks on this machine.

    Raises:
        RecipeError: there is none.
    """
    given = Path(include_path).expanduser()
    for folder in (given.absolute(), ROOT / given):
        if folder.is_dir():
            return folder
    raise RecipeError(f"evaluation.include_path: {given}: no such folder (seen from {Path.cwd().name}/ and from {ROOT.name}/)")


def with_data(config: dict[str, Any], yaml_path: Path | None) -> dict[str, Any]:
    """Return the task with its data_files as they are on this machine: beside its YAML, or below the project's root."""
    settings = config.get("dataset_kwargs")
    if not yaml_path or not isinstance(settings, dict) or "data_files" not in settings:
        return config
    return config | {"dataset_kwargs": settings | {"data_files": _files(settings["data_files"], yaml_path.parent)}}


def _files(given: Any, folder: Path) -> Any:
    if isinstance(given, dict):
        return {split: _files(files, folder) for split, files in given.items()}
    if isinstance(given, list):
        return [_files(file, folder) for file in given]
    if "://" in given:
        return given
    place, name = located(given, folder)
    return str(place / name)


def located(given: str, folder: Path) -> tuple[Path, str]:
    """Return a folder, and the name in it of `given` (a file or pattern in data_files of a task whose YAML is in `folder`).

    Raises:
        FileNotFoundError: there is no such file on this machine.
    """
    places = [(folder, given), (folder / CARRIED, carried(given)), (ROOT, given), (Path.cwd(), given)]
    if Path(given).is_absolute():
        places = [places[1], (Path("/"), given.lstrip("/"))]
    for place, name in places:
        if any(place.glob(name)):
            return place, name
    looked = dict.fromkeys(f"{place.name}/" for place, _ in places if place.name != CARRIED)
    raise FileNotFoundError(f"data_files: {given}: no such file in {', '.join(looked)}")


def carried(given: str) -> str:
    """Return the name below CARRIED of a file outside of the folder of tasks."""
    return re.sub(r"(?:^|(?<=/))\.\.(?=/)", "_up", given).lstrip("/")


def files(folder: Path) -> dict[str, Path]:
    """List all that a folder of tasks takes elsewhere, by name below it: its files, and those that its tasks name as data.

    Raises:
        FileNotFoundError: a task's data is not there.
    """
    found = all_files(folder)
    for file in [file for name, file in found.items() if name.endswith((".yaml", ".yml"))]:
        for given in _data_files(file):
            try:
                place, pattern = located(given, file.parent)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{file.relative_to(folder)}: {error}") from None
            for match in place.glob(pattern):
                if match.is_file() and not match.resolve().is_relative_to(folder.resolve()):
                    beside = file.parent.relative_to(folder) / CARRIED
                    found[str(beside / carried(str(match.relative_to(place))))] = match
    return found


def all_files(folder: Path) -> dict[str, Path]:
    """List all files less hidden ones, and what Python has compiled."""
    named = {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {str(name): file for name, file in named.items() if not any(part.startswith((".", "__")) for part in name.parts)}


class _Reader(yaml_core.CoreLoader):
    """A task's YAML, its functions by their names."""


_Reader.add_constructor("!function", lambda loader, node: node.value)


def _data_files(file: Path) -> list[str]:
    """List the data files that a task's YAML names; none where the file is no task."""
    try:
        content = yaml_core.load(file.read_bytes(), _Reader)
        given = (content.get("dataset_kwargs") or {}).get("data_files")
    except (yaml_core.YAMLError, AttributeError):  # the harness passes it by
        return []
    values = list(given.values()) if isinstance(given, dict) else [given]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return [text for text in texts if isinstance(text, str) and "://" not in text]
