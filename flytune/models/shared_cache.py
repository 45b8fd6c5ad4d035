"""Base models on a volume that all pods mount, downloaded from the hub once: cluster.yaml's `model_cache`.

It has the layout of a Hugging Face cache, so that `hf download --cache-dir` may fill it too. Several pods may
fill it at once without locks, which not all network file systems have: a file appears complete under its
name, and is never replaced.
"""

import shutil
from pathlib import Path

from flytune import files
from flytune.errors import DataError, StorageError
from flytune.models import base
from flytune.models.base import BaseRequest


class _LacksFile(Exception):
    """A file is missing in a cache that cannot be written."""


def fill(wanted: BaseRequest, cache: Path, scratch: Path, read_only: bool = False) -> Path | None:
    """Return the folder of a model's files at its commit in the cache; first download those that it lacks.

    Args:
        wanted: the model, with its commit.
        cache: the folder of all models.
        scratch: a folder of this machine, for one file at a time.
        read_only: whether nothing is downloaded; None is returned if a file is missing.

    Raises:
        RecipeError: as `base.copy_from_hub`.
        StorageError: the cache cannot be written.
    """
    snapshot = _snapshot(wanted, cache)
    done = snapshot.with_name(f".{snapshot.name}{'-code' if wanted.trust_remote_code else ''}.complete")
    if done.exists():
        return snapshot

    def has(name: str, size: int) -> bool:
        if (cache / name).is_file() and (cache / name).stat().st_size == size:
            return True
        if read_only:
            raise _LacksFile
        return False

    def store(file: Path, name: str) -> None:
        if Path(name).parent.name == "refs":  # what `main` is: each run's own commit
            return
        try:
            with files.created_atomically(cache / name) as temporary:
                shutil.copyfile(file, temporary)
        except OSError as error:
            raise StorageError(
                f"cluster.yaml: model_cache: {cache / name}: cannot be written: {error.strerror or error}; "
                "make room, or make the folder writable for user or group 10001 (docs/pods.md, Volumes)"
            ) from error

    try:
        base.copy_from_hub(wanted, store, scratch, has)
    except _LacksFile:
        return None
    if not read_only:
        with files.created_atomically(done) as temporary:
            temporary.touch()
    return snapshot


def link(wanted: BaseRequest, cache: Path, hub: Path) -> None:
    """Link a model at its commit in the cache into this machine's own Hugging Face cache, so that libraries
    find it.

    Raises:
        DataError: it is not in the cache.
    """
    snapshot, here = _snapshot(wanted, cache), _snapshot(wanted, hub)
    if not (snapshot / "config.json").is_file():
        raise DataError(
            f"cluster.yaml: model_cache: {snapshot}: the stored base model is gone; run again with "
            "--overwrite-cache, which fetches it again"
        )
    here.parent.mkdir(parents=True, exist_ok=True)
    if not here.exists():
        here.symlink_to(snapshot, target_is_directory=True)
    if wanted.revision != wanted.commit:
        ref = here.parents[1] / "refs" / wanted.revision
        with files.written_atomically(ref) as temporary:
            temporary.write_text(str(wanted.commit), encoding="utf-8")


def _snapshot(wanted: BaseRequest, cache: Path) -> Path:
    return cache / base.cached_name(wanted.name_or_path) / "snapshots" / str(wanted.commit)
