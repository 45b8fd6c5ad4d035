"""Data sources: files, folders and fsspec addresses, and a fingerprint of their content."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from flytune.data.hub import resolved_revision
from flytune.errors import DataError
from flytune.files import SETTINGS, sha256_of
from flytune.recipe import Data
from flytune.storage import Storage


def divided_at_pattern(path: str) -> tuple[str, str]:
    """Return the folder before the first pattern in a path or an address, and the rest, which is empty
    without one.

    `**` stands for any folders. An existing path is not a pattern, and in an address only `*` makes one.
    """
    is_address = "://" in path and not path.startswith("file://")
    if not (match := re.search(r"\*" if is_address else r"[*?\[]", path)):
        return path, ""
    if not is_address and os.path.lexists(Path(path.removeprefix("file://")).expanduser()):
        return path, ""
    folder, _, rest = path[: match.start()].rpartition("/")
    rest += path[match.start() :]
    return folder or ("/" if path.startswith("/") else "."), rest


class Wanted:
    """Choice of the files of a folder: those of a pattern (empty: all) that no pattern of `exclude`
    matches."""

    def __init__(self, pattern: str, exclude: Sequence[str]) -> None:
        self._pattern = _parts(pattern)
        # A pattern without a slash is a name anywhere; of all others the beginning is that of the folder.
        self._exclude = {
            pattern_given: _parts(pattern_given if "/" in pattern_given.strip("/") else f"**/{pattern_given}")
            for pattern_given in exclude
        }
        self.unused = dict.fromkeys(exclude)
        """Patterns of `exclude` that have matched nothing yet."""

    def has(self, name: str, is_folder: bool = False) -> bool:
        """Return whether a file below the folder is wanted, or a folder in it may have such files."""
        parts = name.split("/")
        for written, pattern in self._exclude.items():
            if _matches(parts, pattern):
                self.unused.pop(written, None)
                return False
        return not self._pattern or _begins(parts, self._pattern) if is_folder else self._is_chosen(parts)

    def _is_chosen(self, parts: list[str]) -> bool:
        """Return whether the pattern matches a file, or a folder that it is in."""
        return not self._pattern or any(
            _matches(parts[:end], self._pattern) for end in range(1, len(parts) + 1)
        )


def _parts(pattern: str) -> list[str]:
    """Return the names in a pattern; a row of `**` is one, so that matching stays short."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    return [part for at, part in enumerate(parts) if part != "**" or parts[at - 1 : at] != ["**"]]


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Return whether a path is matched as a whole: by a table, since several `**` would take long by
    trial."""
    reached = {0}
    for part in [*parts, None]:
        for at in sorted(reached):
            while at < len(pattern) and pattern[at] == "**":
                at += 1
                reached.add(at)
        if part is None:
            break
        reached = {
            at if pattern[at] == "**" else at + 1
            for at in reached
            if at < len(pattern) and (pattern[at] == "**" or fnmatchcase(part, pattern[at]))
        }
    return len(pattern) in reached


def _begins(parts: list[str], pattern: list[str]) -> bool:
    """Return whether a folder may have files that the pattern matches, or is matched itself."""
    end = next((at for at, part in enumerate(pattern) if part == "**"), len(pattern))
    return all(fnmatchcase(part, wanted) for part, wanted in zip(parts, pattern[:end], strict=False))


TEXT_KINDS = {
    "jsonl": "json lines",
    "ndjson": "json lines",
    "json": "json",
    "csv": "csv",
    "tsv": "tsv",
    "txt": "text",
}
KINDS = {**TEXT_KINDS, "parquet": "parquet", "arrow": "arrow"}
"""Kinds of files by suffix, in any case."""
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
"""Further suffixes of text kinds."""
_KINDS_SHOWN = (
    "JSON Lines (.jsonl, .ndjson), JSON (.json), CSV (.csv, .tsv), Parquet (.parquet), Arrow (.arrow) or, "
    "without other kinds, text (.txt)"
)
_TEMPLATES = SETTINGS / "chat_templates"
LARGEST_TEMPLATE = 1_000_000
"""Bytes of a chat template; those of published models have 50,000 at most."""
_IGNORED = re.compile(
    r"(?:readme|licen[cs]e|notice|citation|changelog)(?:\..*)?|dataset_infos?\.json|.*\.(?:md|crc|md5|sha256|dvc|lock|log)",
    re.IGNORECASE,
)
"""Names of files in a folder of data that are not data, in addition to those that begin with a dot or an
underscore."""
_HELDOUT = {"test", "validation", "valid", "val", "eval", "evaluation", "dev", "heldout"}
"""Names of folders of held-out data, and first or last words of the names of such files."""


class Files(NamedTuple):
    """Files of one path or address, in order."""

    filesystem: Any
    """An fsspec file system."""
    files: list[str]
    """Paths in the file system."""
    labels: list[str]
    """Paths in messages: below the path in the recipe."""
    saved: bool
    """True for a folder of `datasets.save_to_disk`."""
    unused: tuple[str, ...] = ()
    """Patterns to exclude that match nothing."""


def kind(name: str) -> str | None:
    """Return the kind of a file with this name (a value of KINDS), or None."""
    name = name.lower()
    compression = next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), "")
    return (TEXT_KINDS if compression else KINDS).get(name.removesuffix(compression).rpartition(".")[2])


def locate(path: str, key: str, exclude: Sequence[str] = ()) -> Files:
    """Return the data files at `path`; `key` is the recipe's name for it, for messages.

    Of a folder, these are all its data files, sorted by name, those of the folders in it included, but none
    that a name or pattern of `exclude` matches. Of a pattern, those files and folders that it matches. Links
    are followed.

    Raises:
        DataError: nothing is there, it cannot be reached, or it is not data; or a folder has something that
            is not read.
    """
    root, pattern = divided_at_pattern(path)
    storage, wanted = _storage(root, key), Wanted(pattern, exclude)
    try:
        is_file = storage.info()["type"] == "file"
        names = [] if is_file else list(_walk(storage, "", {}, wanted))
    except FileNotFoundError:
        raise DataError(f"{key}: {path}: no such file or folder{beside(root)}") from None
    except RuntimeError as error:  # of links
        raise DataError(f"{key}: {path}: {error}") from None
    if pattern and not names:
        listed = [] if is_file else list(_walk(storage, "", {}, Wanted("", ())))
        raise DataError(
            f"{key}: {path}: no file matches this pattern; of {root}, {_listing(_first_parts(listed))}"
        )
    if is_file and kind(storage.path()) is None:
        raise DataError(f"{key}: {path}: unknown kind of file; known are {_KINDS_SHOWN}")
    if is_file and exclude:
        raise DataError(
            f"{key}: {path}: one file, of which exclude leaves nothing out; name its folder, or remove "
            "exclude"
        )
    if is_file:
        return Files(storage.filesystem, [storage.path()], [path], saved=False)
    return _folder(path, root, key, storage, names)._replace(unused=tuple(wanted.unused))


def refuse_splits(data: Data) -> None:
    """Refuse a name of a split beside files, which have none.

    Raises:
        DataError: data.dataset_split is set, and neither the source nor data.heldout_path can have it.
    """
    for key, source in data.all_sources.items():
        if source.path is None or data.heldout_path is not None or not source.changed("dataset_split"):
            continue
        if not locate(source.path, f"{key}.path", source.exclude).saved:
            raise DataError(
                f"{key}.dataset_split: {source.dataset_split}, but {source.path} is no folder of "
                "datasets.save_to_disk, and files have no splits; name the files of this split in path, or "
                "remove dataset_split"
            )


def _first_parts(names: list[str]) -> list[str]:
    return sorted({name.partition("/")[0] for name in names})


def _walk(storage: Storage, folder: str, seen: dict[str, str], wanted: Wanted) -> Iterator[str]:
    """Yield the names of all wanted files below a folder, relative to the address; `seen` are folders by
    their real paths.

    Raises:
        RuntimeError: a link leads nowhere, or to a folder that is read anyway.
    """
    path = storage.path(folder)
    real = os.path.realpath(path) if storage.is_local else path
    if real in seen:
        raise RuntimeError(
            f"{folder} is a link to the folder {seen[real] or 'itself'}, which is read too; remove the link"
        )
    seen[real] = folder
    for entry in sorted(storage.entries(folder), key=lambda entry: str(entry["name"])):
        name = entry["name"].rstrip("/").rpartition("/")[2]
        inner = f"{folder}/{name}" if folder else name
        # Stores of objects list an empty object for the folder itself. A link has a type of its own.
        if entry["name"].rstrip("/") == path.rstrip("/"):
            continue
        if name == "_delta_log":
            raise RuntimeError(
                f"{inner}: a Delta table, whose files have deleted rows too; write it as Parquet elsewhere"
            )
        if name.startswith((".", "_")):
            continue
        is_link = bool(entry.get("islink"))
        is_folder = entry["type"] == "directory" or (is_link and storage.filesystem.isdir(entry["name"]))
        if not wanted.has(inner, is_folder):
            continue
        if is_folder:
            yield from _walk(storage, inner, seen, wanted)
        elif entry["type"] == "file" or storage.filesystem.isfile(entry["name"]):
            yield inner
        else:
            raise RuntimeError(
                f"{inner} is {'a link that leads nowhere' if is_link else 'no file'}; remove it"
            )


def size(path: str, key: str, exclude: Sequence[str] = ()) -> int | None:
    """Return the stored bytes of all data files at `path`; None if they are not read as files
    (`save_to_disk`).

    Raises:
        DataError: as `locate`.
    """
    files = locate(path, key, exclude)
    return None if files.saved else sum(files.filesystem.info(file)["size"] or 0 for file in files.files)


def _folder(path: str, root: str, key: str, storage: Storage, names: list[str]) -> Files:
    saved = bool({"state.json", "dataset_dict.json"} & set(names))
    files = [name for name in names if saved or not _IGNORED.fullmatch(name.rpartition("/")[2])]
    if not saved:
        _refuse_others(path, key, files)
    if not files:
        raise DataError(
            f"{key}: {path}: no file of {_KINDS_SHOWN} in this folder; {_listing(_first_parts(names))}"
        )
    labels = [f"{root.rstrip('/')}/{name}" for name in files]
    return Files(storage.filesystem, [storage.path(name) for name in files], labels, saved)


def _refuse_others(path: str, key: str, files: list[str]) -> None:
    """Refuse files that would be left out, and folders and files that are most likely held-out data."""
    others = [name for name in files if kind(name) is None]
    texts = [name for name in files if kind(name) == "text"]
    # Beside rows, text files are mostly notes; they have no other columns than text.
    others += texts if len(texts) < len(files) else []
    if others and len(others) < len(files):
        raise DataError(
            f"{key}: {path}: {_listing(others)}, which cannot be read, beside data; known are "
            f"{_KINDS_SHOWN}. Leave them out (data.exclude: [NAME]), name the others (data.path: "
            "FOLDER/*.jsonl), or several sources in data.sources"
        )
    if others:
        raise DataError(f"{key}: {path}: no file of {_KINDS_SHOWN} in this folder; {_listing(others)}")
    for name in files:
        folders = name.split("/")[:-1]
        if heldout := next((folder for folder in folders if folder.lower() in _HELDOUT), None):
            raise DataError(
                f"{key}: {path}: {name}: the folder {heldout} is named like held-out data, and all files of "
                "a folder are read; name the folder of training data, or leave this one out (data.exclude: "
                f"[{heldout}]), and name it in data.heldout_path"
            )
    tests = [name for name in files if _is_test(name)]
    if tests and len(tests) < len(files):
        file = tests[0].rpartition("/")[2]
        raise DataError(
            f"{key}: {path}: {tests[0]}: is named like held-out data, and all files of a folder are read; "
            f"leave it out (data.exclude: [{file}]), and name it in data.heldout_path; to train on it, name "
            "each file in data.sources"
        )


def _is_test(name: str) -> bool:
    """Return whether the first or the last word of a file's name is one for held-out data:
    `test-00000-of-00001.parquet`, `rows_val.jsonl`."""
    stem = name.rpartition("/")[2].lower()
    for compression in COMPRESSIONS:
        stem = stem.removesuffix(compression)
    words = re.findall("[a-z]+", stem.rpartition(".")[0])
    return bool(_HELDOUT & {*words[:1], *words[-1:]})


def fingerprint(data: Data) -> str:
    """Return a hash of the content of a recipe's data section: 64 hex digits that change when the content
    does.

    Local files are hashed completely. Of files at an address, it hashes the checksum that the file system
    keeps, with name and size; of a data set on the hub, the commit.

    Raises:
        DataError: a source does not exist or cannot be reached.
    """
    parts: list[tuple[str, ...]] = []
    for key, source in data.all_sources.items():
        if source.dataset_name is not None:
            revision = resolved_revision(source.dataset_name, source.revision, key)
            parts.append((f"{key}.dataset_name", source.dataset_name, revision))
    paths = {f"{key}.path": (source.path, source.exclude) for key, source in data.all_sources.items()}
    for key, (path, exclude) in {**paths, "data.heldout_path": (data.heldout_path, [])}.items():
        if path is not None:
            parts += [(key, *part) for part in _digests(locate(path, key, exclude))]
    if data.chat_template is not None:
        parts.append(("chat_template", read_chat_template(data.chat_template)))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _digests(source: Files) -> Iterator[tuple[str, str]]:
    local = "file" in source.filesystem.protocol
    for file, label in tqdm(
        list(zip(source.files, source.labels, strict=True)), desc="fingerprint", unit=" files", delay=2
    ):
        name = label.rpartition("/")[2]
        if local:
            yield name, _file_sha256(Path(file), label)
        else:
            info = source.filesystem.info(file)
            kept = next(
                (info[mark] for mark in ("ETag", "etag", "md5Hash", "crc32c") if info.get(mark)), None
            )
            yield name, f"{info.get('size')} {kept or source.filesystem.checksum(file)}"


def _file_sha256(file: Path, label: str) -> str:
    try:
        return sha256_of(file)
    except OSError as error:
        raise DataError(f"{label}: cannot be read: {error.strerror or error}") from None


def shipped_templates() -> dict[str, Path]:
    """Return the chat templates that recipes may name without a path."""
    return {file.stem: file for file in sorted(_TEMPLATES.glob("*.jinja"))}


def read_chat_template(path: str) -> str:
    """Return the content of the recipe's Jinja file, of the one at an address, or of a shipped one by its
    name.

    Raises:
        DataError: it is not there, or not text.
    """
    shipped = shipped_templates()
    try:
        return (
            _storage(str(shipped.get(path, path)), "data.chat_template")
            .read(largest=LARGEST_TEMPLATE)
            .decode("utf-8")
        )
    except FileNotFoundError:
        names = "" if "/" in path else f"; shipped are {', '.join(shipped)}"
        raise DataError(f"data.chat_template: {path}: no such file{names}{beside(path)}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"data.chat_template: {path}: cannot be read: {error}") from error


def _storage(path: str, key: str) -> Storage:
    return Storage(path, key, error=DataError, failed="cannot be read", retry=False)


def beside(path: str) -> str:
    """Describe the folder in which a path is missing."""
    if "://" in path:
        return " at this address, or these credentials have no access to it"
    parent = Path(path).expanduser().absolute().parent
    if not parent.is_dir():
        return f"; its folder {parent} does not exist either"
    return f"; the folder {parent} {_listing([entry.name for entry in parent.iterdir()], verb='has')}"


def _listing(names: list[str], verb: str = "it has") -> str:
    shown = sorted(names)[:8]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{verb} {', '.join(shown)}{more}" if shown else f"{verb} nothing"
