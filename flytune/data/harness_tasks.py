"""A recipe's own tasks of lm-evaluation-harness: their folder, their YAML files and their data files."""

import re
from pathlib import Path
from typing import Any

from flytune import yaml_core
from flytune.errors import RecipeError
from flytune.files import ROOT as CLONE
from flytune.files import FileRefusedError, check_regular, read_regular
from flytune.models import remote
from flytune.recipe import Evaluation

ROOT = CLONE or Path()
"""Root folder of the code, which is shipped to pods; the current folder where there is no clone."""
CARRIED = "_data_files"
"""Name of the folder next to an uploaded task with those of its data_files that were outside the folder of
tasks."""

NOT_UPLOADED = (
    "; a pod has the files that `pyflyte run` uploads with the recipe, and a run from the console or of a "
    "schedule uploads none: write an address (s3://...)"
)
"""End of a sentence on files that are not there."""


def loader(upstream: Any, base_dir: Path, *, resolve_funcs: bool) -> Any:
    """Return the loader of a YAML file in `base_dir`."""
    from lm_eval.tasks import _yaml_loader

    if base_dir.is_relative_to(Path(_yaml_loader.__file__).parent):
        return upstream(base_dir, resolve_funcs=resolve_funcs)
    with_functions: Any = type("Loader", (yaml_core.CoreLoader,), {})
    with_functions.add_constructor("!function", _yaml_loader._mk_function_ctor(base_dir, resolve_funcs))
    return with_functions


def folder(evaluation: Evaluation) -> Path | None:
    """Return the recipe's folder of tasks, downloaded where it is at an address; None if the recipe has none.

    Raises:
        RecipeError: the folder does not exist.
        StorageError: its storage cannot be reached.
    """
    if evaluation.include_path is None:
        return None
    if "://" in evaluation.include_path:
        return remote.fetch_folder(evaluation.include_path, "evaluation.include_path")
    return local_folder(evaluation.include_path)


def local_folder(include_path: str) -> Path:
    """Return the recipe's folder of tasks on this machine.

    Raises:
        RecipeError: the folder does not exist, or has a YAML file that is not a regular file.
    """
    given = Path(include_path).expanduser()
    for folder in (given.absolute(), ROOT / given):
        if folder.is_dir():
            _check_files(folder)
            return folder
    seen = " and from ".join(dict.fromkeys(f"{folder.name}/" for folder in (Path.cwd(), ROOT.absolute())))
    raise RecipeError(f"evaluation.include_path: {given}: no such folder (seen from {seen})")


def _check_files(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".yaml", ".yml") and path.exists():
            try:
                check_regular(path, yaml_core.LARGEST)
            except FileRefusedError as error:
                raise RecipeError(f"evaluation.include_path: {path}: {error}") from None


def with_data(config: dict[str, Any], yaml_path: Path | None) -> dict[str, Any]:
    """Return the task's config with the paths of its data_files on this machine: next to its YAML, or in the
    project."""
    settings = config.get("dataset_kwargs")
    if not yaml_path or not isinstance(settings, dict) or "data_files" not in settings:
        return config
    try:
        located_files = _files(settings["data_files"], yaml_path.parent)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{yaml_path.name}: {error}") from None
    return config | {"dataset_kwargs": settings | {"data_files": located_files}}


def _files(given: Any, folder: Path) -> Any:
    if isinstance(given, dict):
        return {split: _files(files, folder) for split, files in given.items()}
    if isinstance(given, list):
        return [_files(file, folder) for file in given]
    if "://" in given:
        return given
    parent, name = located(given, folder)
    return str(parent / name)


def located(given: str, folder: Path) -> tuple[Path, str]:
    """Return the folder of `given` (a file or pattern in data_files of a task whose YAML is in `folder`), and
    its name there.

    Raises:
        FileNotFoundError: there is no such file on this machine, or no regular one.
    """
    candidates = [(folder, given), (folder / CARRIED, carried(given)), (ROOT, given), (Path.cwd(), given)]
    if Path(given).is_absolute():
        candidates = [candidates[1], (Path("/"), given.lstrip("/"))]
    for parent, name in candidates:
        if matching := list(parent.glob(name)):
            _check_regular([file for file in matching if not file.is_dir()], given)
            return parent, name
    searched = dict.fromkeys(f"{parent.name}/" for parent, _ in candidates if parent.name != CARRIED)
    raise FileNotFoundError(f"data_files: {given}: no such file in {', '.join(searched)}{NOT_UPLOADED}")


def _check_regular(files_found: list[Path], given: str) -> None:
    for file in files_found:
        try:
            check_regular(file)
        except FileRefusedError as error:
            raise FileNotFoundError(f"data_files: {given}: {error}") from None


def carried(given: str) -> str:
    """Return the path below CARRIED for a file outside the folder of tasks."""
    return re.sub(r"(?:^|(?<=/))\.\.(?=/)", "_up", given).lstrip("/")


def files(folder: Path) -> dict[str, Path]:
    """List the files to upload with a folder of tasks, by their paths below it: its own files, and its tasks'
    data files.

    Raises:
        FileNotFoundError: a data file of a task does not exist.
    """
    carried_files = all_files(folder)
    for file in [file for name, file in carried_files.items() if name.endswith((".yaml", ".yml"))]:
        for given in _data_files(file):
            try:
                parent, pattern = located(given, file.parent)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{file.relative_to(folder)}: {error}") from None
            for match in parent.glob(pattern):
                if match.is_file() and not match.resolve().is_relative_to(folder.resolve()):
                    target = file.parent.relative_to(folder) / CARRIED
                    carried_files[str(target / carried(str(match.relative_to(parent))))] = match
    return carried_files


def all_files(folder: Path) -> dict[str, Path]:
    """List all files by their paths below `folder`, without hidden files and Python's compiled ones."""
    named = {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {
        str(name): file
        for name, file in named.items()
        if not any(part.startswith((".", "__")) for part in name.parts)
    }


class _Reader(yaml_core.CoreLoader):
    """Loader of a task's YAML that keeps functions as their names."""


_Reader.add_constructor("!function", lambda loader, node: node.value)


def _data_files(file: Path) -> list[str]:
    """List the data files in a task's YAML; none where the file is not a task."""
    try:
        content = yaml_core.load(read_regular(file, yaml_core.LARGEST), _Reader)
        given = (content.get("dataset_kwargs") or {}).get("data_files")
    except (yaml_core.YAMLError, AttributeError):  # the harness skips such a file
        return []
    values = list(given.values()) if isinstance(given, dict) else [given]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return [text for text in texts if isinstance(text, str) and "://" not in text]
