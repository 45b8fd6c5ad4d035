"""Files of the base model: their source, those that a run needs, and their copy for pods without access to
the hub.

A model is a folder, an id of the Hugging Face hub (owner/name), or an fsspec address (s3://bucket/artifact).
Libraries get `local_name`; records keep the recipe's name.

A volume that all pods mount (cluster.yaml's `model_cache`) has the layout of a Hugging Face cache, so that
`hf download --cache-dir` may fill it too. Several pods may fill it at once without locks, which not all
network file systems have: a file appears complete under its name, and is never replaced.
"""

import functools
import hashlib
import logging
import os
import re
import shutil
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flytune import files, patches
from flytune.errors import DataError, RecipeError, StorageError
from flytune.files import CHUNK, FileRefusedError, check_regular, open_regular
from flytune.models import remote
from flytune.models.remote import INDEX, TEXTS, files_to_fetch
from flytune.recipe import Model
from flytune.records import contents
from flytune.schema import Record

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 1.0
_LARGEST_TEXT = 500_000_000
"""Bytes of a config or tokenizer file, which libraries read completely; published ones have 40 MB at most."""


class BaseRequest(Record):
    """Everything that fetching a base model depends on; the cache key of the fetched model."""

    name_or_path: str
    revision: str = "main"
    """Revision of the recipe; pods without access to the hub look up the commit under this name."""
    commit: str | None = None
    """Commit of `revision` when the run was planned; None for a model that is not on the hub."""
    trust_remote_code: bool = False
    """True if its Python files are needed too."""


def is_address(name: str) -> bool:
    """Return whether a name is an fsspec address, neither a folder nor an id of the hub."""
    return "://" in name


def is_path(name: str) -> bool:
    """Return whether a name that is not an address cannot be an id of the hub."""
    return name.startswith(("/", ".", "~")) or name.count("/") != 1


def is_on_hub(model: Model) -> bool:
    """Return whether a model is neither a folder of this machine nor at an address."""
    return not is_address(model.name_or_path) and not Path(model.name_or_path).expanduser().is_dir()


def hub_answers() -> bool:
    """Return whether the hub or its proxy accepts a connection within a second; huggingface_hub tries for
    half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []
    # In a thread: a name lookup has no timeout.
    attempt = threading.Thread(target=lambda: answers.append(_connects(constants.ENDPOINT)), daemon=True)
    attempt.start()
    attempt.join(_CONNECT_SECONDS)
    return answers == [True]


@contextmanager
def without_waiting_for_the_hub() -> Iterator[None]:
    """Read this machine's cache alone in the block where the hub does not answer, instead of asking it again
    and again."""
    if hub_answers():
        yield
        return
    with patches.huggingface_hub.OFFLINE.replaced(True):
        yield


@contextmanager
def asking_the_hub() -> Iterator[None]:
    """Ask the hub in the block, also in a pod that otherwise loads nothing from it (HF_HUB_OFFLINE)."""
    with patches.huggingface_hub.OFFLINE.replaced(False):
        yield


def _connects(address: str) -> bool:
    try:
        to, proxies = urllib.parse.urlsplit(address), urllib.request.getproxies()
        proxy = proxies.get(to.scheme) or proxies.get("all")
        if proxy and not urllib.request.proxy_bypass(to.hostname or ""):
            to = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        socket.create_connection(
            (to.hostname, to.port or (443 if to.scheme == "https" else 80)), _CONNECT_SECONDS
        ).close()
    except (OSError, ValueError):  # ValueError: an invalid address
        return False
    return True


def commit_of(model: Model) -> str | None:
    """Return the current commit of `revision` of a model on the hub, from this machine's cache if the hub
    does not answer.

    None for a model that is not on the hub, and if the commit is unknown.
    """
    if not is_on_hub(model) or (model.revision and re.fullmatch(r"[0-9a-f]{40}", model.revision)):
        return model.revision
    from huggingface_hub import HfApi

    try:
        resolution = HfApi().resolve_revision(
            model.name_or_path, revision=model.revision, local_files_only=not hub_answers()
        )
        return str(resolution.resolved)
    except Exception as error:  # noqa: BLE001 (the hub's errors are OSErrors; those of a proxy are not)
        log.warning("%s: its commit is unknown: %s", model.name_or_path, type(error).__name__)
        return None


def request(model: Model) -> BaseRequest:
    """Return the request for the current files of a model."""
    return BaseRequest(
        name_or_path=model.name_or_path,
        revision=model.revision or "main",
        commit=commit_of(model) if is_on_hub(model) else None,
        trust_remote_code=model.trust_remote_code,
    )


def require_commit(wanted: BaseRequest, model: Model) -> BaseRequest:
    """Return the request after a check that its commit is known if the model is on the hub: pods need it.

    Raises:
        RecipeError: the commit is unknown.
    """
    if wanted.commit is None and is_on_hub(model):
        raise RecipeError(
            f"model.name_or_path: {wanted.name_or_path}: its commit is unknown because the hub did not "
            "answer; run again, or give model.revision: a commit"
        )
    return wanted


def pinned(model: Model, commit: str | None) -> Model:
    """Return the model at that commit; unchanged if there is none."""
    return model.model_copy(update={"revision": commit or model.revision})


def tokenizer_identity(model: Model) -> str:
    """Return 16 hex digits that change when the config or tokenizer files of a folder or an address may have
    changed.

    Empty for a model on the hub, which the commit identifies.

    Raises:
        RecipeError: the address cannot be read.
        StorageError: its storage is away.
    """
    if is_address(model.name_or_path):
        return remote.identity(model.name_or_path)
    if is_on_hub(model):
        return ""
    folder = Path(model.name_or_path).expanduser()
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in TEXTS):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with open_regular(path, _LARGEST_TEXT) as content:
            while chunk := content.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def local_name(model: Model, weights: bool = True) -> str:
    """Return the argument of from_pretrained: a hub id or a folder. An address is fetched once per node.

    Args:
        model: the recipe's model section.
        weights: whether more than config and tokenizer is needed.

    Raises:
        RecipeError: the folder is not on this machine, or holds what is not a file; the address cannot be
            read or has no model.
        ExportError: the folder is an artifact, and a file of it was changed.
        StorageError: the address's storage is away.
    """
    name = model.name_or_path
    if is_address(name):
        return str(remote.fetch_model(name, weights, model.trust_remote_code))
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_files(folder)
        if weights:
            _verify(folder)
        return str(folder)
    if is_path(name):
        raise RecipeError(
            f"model.name_or_path: {name}: no such folder (seen from {Path.cwd().name}/), and not a hub id of "
            "the form owner/name; pods of a cluster see mounted folders and addresses (s3://...) alone"
        )
    refuse_adapter(model)
    return name


def configuration(model: Model) -> Any:
    """Return transformers' configuration of a base model; raises as `local_name` and transformers do."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(
        local_name(model, weights=False), revision=model.revision, trust_remote_code=model.trust_remote_code
    )


def refuse_adapter(model: Model, ask: bool = False) -> None:
    """Refuse a model of the hub with an adapter beside its config.json, in this machine's cache or, where it
    may `ask`, on the hub.

    Raises:
        RecipeError: there is one.
    """
    name, file = model.name_or_path, "adapter_config.json"
    if not is_on_hub(model) or not (_hub_cache() / cached_name(name)).is_dir():
        return
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, file, revision=model.revision)
    if cached is None and ask:
        with suppress(
            Exception
        ):  # the hub has none, which its cache notes; or it refuses, as for config.json
            cached = hf_hub_download(name, file, revision=model.revision)
    if isinstance(cached, str) and Path(cached).with_name("config.json").is_file():
        raise RecipeError(
            f"model.name_or_path: {name}: {file} is beside config.json ({cached}), so that transformers "
            "would load that adapter, and the base that it names, in place of this model; copy the model's "
            "files without it into a folder, and name the folder"
        )


def _hub_cache() -> Path:
    """Return the folder of the hub's cache, as huggingface_hub chooses it; a plan does not import that."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(cache)).expanduser()


def _check_files(folder: Path) -> None:
    """Refuse a folder with a pipe, a device or an endless file, which the libraries would open by its name,
    or with an adapter.

    Raises:
        RecipeError: there is one.
    """
    if (folder / "adapter_config.json").is_file() and (folder / "config.json").is_file():
        raise RecipeError(
            f"model.name_or_path: {folder}: adapter_config.json is beside config.json, so that transformers "
            "would load that adapter, and the base that it names, in place of this model; move "
            "adapter_config.json and adapter_model.safetensors into a folder of their own (method.adapter "
            "can start from it)"
        )
    for path in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        if path.exists() and not path.is_dir():
            try:
                check_regular(path, _LARGEST_TEXT if path.suffix in TEXTS else None)
            except FileRefusedError as error:
                raise RecipeError(f"model.name_or_path: {path}: {error}") from None


@functools.cache
def _verify(folder: Path) -> None:
    """Compare the files of a folder that is an artifact with its hashes, once on each node; another folder
    has none."""
    if (folder / contents.CONTENTS).is_file() and os.environ.get("LOCAL_RANK", "0") == "0":
        contents.verify(folder)


def cached_name(name: str) -> str:
    """Return the name of a hub model's folder in a Hugging Face cache."""
    return f"models--{name.replace('/', '--')}"


def copy_from_hub(
    wanted: BaseRequest,
    put: Callable[[Path, str], Any],
    scratch: Path,
    has: Callable[[str, int], bool] | None = None,
) -> None:
    """Hand each file that loading a model of the hub needs to `put`, with its path in a Hugging Face cache,
    one by one.

    Args:
        wanted: the model, with its commit.
        put: function that stores a file before it returns; the file is then deleted, so that the disk holds
            one at a time.
        scratch: a folder for that file.
        has: function that returns whether a file with this path and this number of bytes is stored already.

    Raises:
        RecipeError: the hub refuses the model or cannot be reached, or the model has no safetensors.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.hf_api import RepoFile

    name, commit = wanted.name_or_path, wanted.commit
    assert commit, name
    cached = cached_name(name)

    def hand(file: str) -> None:
        if has is not None and has(f"{cached}/snapshots/{commit}/{file}", sizes[file]):
            return
        path = Path(hf_hub_download(name, file, revision=commit, local_dir=scratch))
        put(path, f"{cached}/snapshots/{commit}/{file}")
        path.unlink()

    try:
        listed = HfApi().list_repo_tree(name, revision=commit)
        sizes = {entry.path: entry.size for entry in listed if isinstance(entry, RepoFile)}
        index = None
        if INDEX in sizes:
            index = Path(hf_hub_download(name, INDEX, revision=commit, local_dir=scratch)).read_bytes()
        for file in files_to_fetch(sizes, index, wanted.trust_remote_code, f"model.name_or_path: {name}"):
            hand(file)
    except (OSError, ValueError) as error:  # all errors of the hub are OSErrors
        raise refused(error, f"model.name_or_path: {name}") from None
    if wanted.revision != commit:
        scratch.mkdir(parents=True, exist_ok=True)  # if no file was downloaded
        (ref := scratch / "ref").write_text(commit, encoding="utf-8")
        put(ref, f"{cached}/refs/{wanted.revision}")


def refused(error: Exception, where: str, otherwise: str = "") -> RecipeError:
    """Return the error for the hub's answer, with advice; `otherwise` is the advice for a hub that cannot be
    reached."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        token = (
            "the token's account has not been granted access"
            if os.environ.get("HF_TOKEN")
            else "no HF_TOKEN is set"
        )
        return RecipeError(
            f"{where}: gated on the hub, and {token}; ask for access on its page, then set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return RecipeError(f"{where}: the hub has no such model.revision")
    if isinstance(error, RepositoryNotFoundError):
        return RecipeError(
            f"{where}: no such folder, and no such repository on the hub (or private: set HF_TOKEN)"
        )
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"no answer from {constants.ENDPOINT}"
        return RecipeError(
            f"{where}: no such folder, and the hub cannot be reached ({why}){otherwise and f'; {otherwise}'}"
        )
    return RecipeError(f"{where}: the hub did not give it: {' '.join(str(error).split())[:200]}")


class _LacksFile(Exception):
    """A file is missing in a cache that cannot be written."""


def fill_shared_cache(
    wanted: BaseRequest, cache: Path, scratch: Path, read_only: bool = False
) -> Path | None:
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
        copy_from_hub(wanted, store, scratch, has)
    except _LacksFile:
        return None
    if not read_only:
        with files.created_atomically(done) as temporary:
            temporary.touch()
    return snapshot


def link_shared_cache(wanted: BaseRequest, cache: Path, hub: Path) -> None:
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
    return cache / cached_name(wanted.name_or_path) / "snapshots" / str(wanted.commit)
