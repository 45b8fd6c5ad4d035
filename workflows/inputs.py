"""Conversion of workflow inputs: YAML files are read as Flytune reads them, and a recipe's local files are uploaded.

Files are uploaded when `pyflyte run --remote` or FlyteRemote converts inputs to Flyte's values; local runs and pods read paths
as they are. The module is imported for its effect, with any workflow.
"""

import hashlib
import math
import os
import sys
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_origin

import click
from flytekit import FlyteContext
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteEntityAlreadyExistsException
from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.remote.remote_fs import FlyteFS
from flytekit.types.directory import FlyteDirectory
from rich.console import Console
from tqdm import tqdm
from tqdm.utils import CallbackIOWrapper

from flytune import addresses, yaml_core
from flytune.errors import RecipeError, StorageError
from flytune.hardware import load_cluster
from flytune.planning import Local, folders, uploads
from flytune.recipe import Recipe
from flytune.schema import load_json, load_yaml

_CHUNK = 8 * 2**20
# Seconds to connect, and between two bytes.
_TIMEOUT = (10, 300)


class RecipeTransformer(PydanticTransformer):
    """Transformer for recipes, which uploads their local files when they are sent to a cluster."""

    def __init__(self) -> None:
        super(PydanticTransformer, self).__init__("Recipe", Recipe, enable_type_assertions=False)

    def to_literal(self, ctx: FlyteContext, python_val: Any, python_type: Any, expected: Any) -> Any:
        """Convert a recipe like flytekit's transformer, with addresses in place of local paths."""
        remote = _remote(ctx)
        if remote is not None and isinstance(python_val, Recipe):
            lacking = folders.problems(python_val, load_cluster(), python_val.hardware.shape, uploaded=False)
            python_val = Recipe.model_validate(_uploaded(remote, uploads.of_recipe(python_val), lacking))
        return super().to_literal(ctx, python_val, python_type, expected)


def _remote(ctx: FlyteContext) -> Any:
    """Return the control plane that a value is converted for; None in pods and local runs."""
    filesystem = ctx.file_access.raw_output_fs
    return filesystem._remote if isinstance(filesystem, FlyteFS) else None


def _uploaded(remote: Any, content: Any, lacking: Sequence[str] = ()) -> Any:
    """Return the content of a recipe or of a sweep's changes, with addresses in place of its local files.

    `lacking` are sentences on folders that pods lack, which are refused together with missing files.
    """
    addresses = {(one.field, one.path): _address(remote, one) for one in uploads.found(content, _limit(), lacking)}
    return uploads.replaced(content, lambda loc, field, path: addresses[field, path])


def _limit() -> float:
    given = os.environ.get(uploads.LIMIT_VARIABLE, "")
    try:
        limit = float(given or uploads.LIMIT_GIB)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        shown = addresses.redact(given)
        raise RecipeError(f"{uploads.LIMIT_VARIABLE}={shown:.60}: give a positive number of GiB")
    return limit


def _address(remote: Any, local: Local) -> str:
    """Return the address of a local file or folder, which depends on its content; upload only files that are not stored yet."""
    with _bar(f"{local.name}: hash", local.size) as bar:
        digests = {name: _digests(file, bar) for name, file in sorted(local.files.items())}
    listed = "".join(f"{sha256} {name}\n" for name, (sha256, _) in digests.items())
    root = hashlib.sha256(listed.encode()).hexdigest()[:32]

    def signed(name: str, md5: bytes | None = None) -> Any:
        where = {"project": remote.default_project, "domain": remote.default_domain, "filename_root": root}
        return remote.client.get_upload_signed_url(**where, filename=f"{local.name}{name and '/'}{name}", content_md5=md5)

    # A name that is never uploaded: admin does not return the address of a stored file.
    address = str(signed("address").native_url).removesuffix("/address")
    sent = 0
    with _bar(f"{local.name}: upload", local.size) as bar:
        for name, (_, md5) in digests.items():
            if not _is_stored(signed, name):
                sent += _put(remote, local.files[name], signed(name, md5), md5, bar, f"{local.key}: {local.path}")
    status = f"uploaded, {tqdm.format_sizeof(sent)}B" if sent else "there already"
    line = f"{local.key}: {local.path}: {address} ({status})"
    Console(stderr=True, soft_wrap=True, highlight=False).print(line, markup=False)
    return address


def _bar(label: str, size: int) -> Any:
    return tqdm(total=size, desc=label, unit="B", unit_scale=True, delay=1)


def _digests(file: Path, bar: Any) -> tuple[str, bytes]:
    """Return the SHA-256 for the address, and the MD5 by which the storage verifies the upload."""
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK):
            sha256.update(chunk)
            md5.update(chunk)
            bar.update(len(chunk))
    return sha256.hexdigest(), md5.digest()


def _is_stored(signed: Any, name: str) -> bool:
    """Return True if a file is stored: admin then signs no upload without the content's hash."""
    try:
        signed(name)
    except RuntimeError as error:  # flytekit wraps admin's error
        if isinstance(error.__cause__, FlyteEntityAlreadyExistsException):
            return True
        raise
    return False


def _put(remote: Any, file: Path, location: Any, md5: bytes, bar: Any, where: str) -> int:
    import requests

    platform, size = remote.config.platform, file.stat().st_size
    headers = {"Content-Length": str(size), "Content-MD5": b64encode(md5).decode()}
    headers |= remote.get_extra_headers_for_protocol(location.native_url) | dict(location.headers)
    verify = False if platform.insecure_skip_verify else platform.ca_cert_file_path
    with file.open("rb") as content:
        # An empty body has to be bytes: object stores take no chunked requests.
        body = CallbackIOWrapper(bar.update, content, "read") if size else b""
        try:
            done = requests.put(location.signed_url, data=body, headers=headers, verify=verify, timeout=_TIMEOUT)
        except requests.RequestException as error:  # the error's text contains the signed address
            raise StorageError(f"{where}: {file.name} was not uploaded: {type(error).__name__}; run it again") from None
    if done.status_code not in (200, 201):
        raise StorageError(f"{where}: {file.name} was not uploaded: the cluster's storage answers {done.status_code}")
    return size


def _patch_pyflyte() -> None:
    """Make `pyflyte run` read YAML as Flytune does, and upload a sweep's changes, files and folders; do nothing in pods."""
    if (run := sys.modules.get("flytekit.clis.sdk_in_container.run")) is None:
        return
    from flytekit.interaction.click_types import DirParamType, FileParamType, JsonParamType

    run.yaml = SimpleNamespace(safe_load=_inputs_file, YAMLError=yaml_core.YAMLError)  # type: ignore[attr-defined]
    if JsonParamType._parse.__module__ != __name__:
        JsonParamType._parse = _parsing(JsonParamType._parse)
        for kind in (DirParamType, FileParamType):
            kind.convert = _converting(kind.convert)


def _inputs_file(file: Any) -> Any:
    """Return the content of --inputs-file; flytekit itself fails on one that is not YAML."""
    return load_yaml(file.name) if hasattr(file, "name") else yaml_core.load(file)


def _parsing(upstream: Any) -> Any:
    def parse(self: Any, value: Any, param: Any) -> Any:
        name = f"--{param.name}" if param is not None else "input"
        content = _content(value, name, self._python_type) if isinstance(value, str) else upstream(self, value, param)
        remote = _submitting()
        if remote is not None and self._python_type in _CHANGES:
            return _uploaded(remote, content)
        if remote is not None and self._python_type == dict[str, FlyteDirectory]:
            return {name: _uploaded_path(remote, path, f"{param.name}.{name}") for name, path in content.items()}
        return content

    return parse


def _content(value: str, name: str, kind: Any) -> Any:
    """Return the content of an input: JSON, or a file of YAML or JSON; flytekit's own readers are not strict.

    Raises:
        RecipeError: it cannot be read, or is not of the input's type.
    """
    if value.lstrip().startswith(("{", "[")):
        content = load_json(value, name)
    elif value.endswith(".json"):
        try:
            with Path(value).open("rb") as file:
                content = load_json(file.read(yaml_core.LARGEST + 1), value)
        except (OSError, ValueError) as error:
            raise RecipeError(f"{name}: {value:.200}: cannot be read: {error!s:.300}") from None
    elif kind in (dict, list) and value.strip() in ("null", ""):
        raise RecipeError(f"{name}: empty; give JSON or a file")
    else:
        content = load_yaml(value)
    wanted = list if (get_origin(kind) or kind) is list else dict
    if not isinstance(content, wanted):
        shown = "a list" if wanted is list else "a mapping"
        raise RecipeError(f"{name}: must be {shown}; found {content!r:.60}")
    return content


def _converting(upstream: Any) -> Any:
    def convert(self: Any, value: Any, param: Any, ctx: Any) -> Any:
        remote = _submitting()
        return upstream(self, _uploaded_path(remote, value, param.name) if remote is not None else value, param, ctx)

    return convert


def _submitting() -> Any:
    """Return the control plane of a `pyflyte run --remote`; None in other commands."""
    context = click.get_current_context(silent=True)
    return context.obj.remote_instance() if context is not None and getattr(context.obj, "is_remote", False) else None


def _uploaded_path(remote: Any, path: Any, key: str) -> Any:
    """Return the address of an uploaded file or folder; flytekit's own upload would flatten subfolders."""
    if not isinstance(path, str) or not uploads.is_local(key, path):
        return path
    return _address(remote, uploads.complete(path, f"--{key}", _limit()))


_CHANGES: tuple[Any, ...] = (dict, list[dict])  # type: ignore[type-arg]  # as in the workflow's signature
"""Types of a sweep's grid and changes."""
TypeEngine.register(RecipeTransformer())
_key = TypeEngine._get_literal_cache_key
# Flytekit caches converted values by the recipe only, but its files or the control plane may have changed.
TypeEngine._get_literal_cache_key = lambda value, kind: None if isinstance(value, Recipe) else _key(value, kind)
_patch_pyflyte()
