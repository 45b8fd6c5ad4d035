"""Inputs on their way from a laptop to workflows: YAML files as Flytune reads them, local files of a recipe as addresses.

What `pyflyte run --remote` and FlyteRemote turn into Flyte's values is uploaded here; runs on this machine, and pods, read
paths as they are. Imported for its effect, with any workflow.
"""

import hashlib
import os
import sys
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

from flytune import yaml_core
from flytune.errors import RecipeError, StorageError
from flytune.planning import uploads
from flytune.planning.uploads import Local
from flytune.recipe.recipe import Recipe
from flytune.schema import Strict, load_yaml

_CHUNK = 8 * 2**20
# Seconds to connect, and between two bytes.
_TIMEOUT = (10, 300)


class RecipeTransformer(PydanticTransformer):
    """Flytekit's transformer, for recipes: where they leave for a cluster, their local files go with them."""

    def __init__(self) -> None:
        super(PydanticTransformer, self).__init__("Recipe", Recipe, enable_type_assertions=False)

    def to_literal(self, ctx: FlyteContext, python_val: Any, python_type: Any, expected: Any) -> Any:
        """Do as flytekit's, with the recipe that has addresses."""
        remote = _remote(ctx)
        if remote is not None and isinstance(python_val, Recipe):
            python_val = Recipe.model_validate(_uploaded(remote, uploads.of_recipe(python_val)))
        return super().to_literal(ctx, python_val, python_type, expected)


def _remote(ctx: FlyteContext) -> Any:
    """Return the control plane that a value is made for; None in pods, and for runs on this machine."""
    filesystem = ctx.file_access.raw_output_fs
    return filesystem._remote if isinstance(filesystem, FlyteFS) else None


def _uploaded(remote: Any, content: Any) -> Any:
    """Return the content of a recipe, or of a sweep's changes to one, with addresses for the local files that it names."""
    addresses = {(one.field, one.path): _address(remote, one) for one in uploads.found(content, _limit())}
    return uploads.replaced(content, lambda loc, field, path: addresses[field, path])


def _limit() -> float:
    given = os.environ.get(uploads.LIMIT_VARIABLE, "")
    try:
        return float(given or uploads.LIMIT_GIB)
    except ValueError:
        raise RecipeError(f"{uploads.LIMIT_VARIABLE}={given}: give a number of GiB") from None


def _address(remote: Any, local: Local) -> str:
    """Return the address of a local file or folder, which its content names; what is there already is not uploaded again."""
    with _bar(f"{local.name}: hash", local.size) as bar:
        digests = {name: _digests(file, bar) for name, file in sorted(local.files.items())}
    listed = "".join(f"{sha256} {name}\n" for name, (sha256, _) in digests.items())
    root = hashlib.sha256(listed.encode()).hexdigest()[:32]

    def signed(name: str, md5: bytes | None = None) -> Any:
        where = {"project": remote.default_project, "domain": remote.default_domain, "filename_root": root}
        return remote.client.get_upload_signed_url(**where, filename=f"{local.name}{name and '/'}{name}", content_md5=md5)

    # A name that nothing is ever uploaded to: of what is there already, admin does not say the address.
    address = str(signed("address").native_url).removesuffix("/address")
    sent = 0
    with _bar(f"{local.name}: upload", local.size) as bar:
        for name, (_, md5) in digests.items():
            if not _is_there(signed, name):
                sent += _put(remote, local.files[name], signed(name, md5), md5, bar, f"{local.key}: {local.path}")
    told = f"uploaded, {tqdm.format_sizeof(sent)}B" if sent else "there already"
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"{local.key}: {local.path}: {address} ({told})", markup=False)
    return address


def _bar(label: str, size: int) -> Any:
    return tqdm(total=size, desc=label, unit="B", unit_scale=True, delay=1)


def _digests(file: Path, bar: Any) -> tuple[str, bytes]:
    """Return SHA-256, which names the content, and the MD5 by which its storage checks it."""
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK):
            sha256.update(chunk)
            md5.update(chunk)
            bar.update(len(chunk))
    return sha256.hexdigest(), md5.digest()


def _is_there(signed: Any, name: str) -> bool:
    """Tell whether a place is taken: admin signs no upload to it then, unless it is given the content's hash."""
    try:
        signed(name)
    except RuntimeError as error:  # flytekit's, around what admin has answered
        if isinstance(error.__cause__, FlyteEntityAlreadyExistsException):
            return True
        raise
    return False


def _put(remote: Any, file: Path, place: Any, md5: bytes, bar: Any, where: str) -> int:
    import requests

    platform, size = remote.config.platform, file.stat().st_size
    headers = {"Content-Length": str(size), "Content-MD5": b64encode(md5).decode()}
    headers |= remote.get_extra_headers_for_protocol(place.native_url) | dict(place.headers)
    verify = False if platform.insecure_skip_verify else platform.ca_cert_file_path
    with file.open("rb") as content:
        # An empty body by its length: object stores take no chunks.
        body = CallbackIOWrapper(bar.update, content, "read") if size else b""
        try:
            done = requests.put(place.signed_url, data=body, headers=headers, verify=verify, timeout=_TIMEOUT)
        except requests.RequestException as error:  # whose text has the signed address
            raise StorageError(f"{where}: {file.name} was not uploaded: {type(error).__name__}; run it again") from None
    if done.status_code not in (200, 201):
        raise StorageError(f"{where}: {file.name} was not uploaded: the cluster's storage answers {done.status_code}")
    return size


def _take_over() -> None:
    """Make `pyflyte run` read YAML as Flytune does, and upload a sweep's changes, files and folders; do nothing in pods."""
    if (run := sys.modules.get("flytekit.clis.sdk_in_container.run")) is None:
        return
    from flytekit.interaction.click_types import DirParamType, FileParamType, JsonParamType

    run.yaml = SimpleNamespace(safe_load=yaml_core.load, YAMLError=yaml_core.YAMLError)  # type: ignore[attr-defined]
    if JsonParamType._parse.__module__ != __name__:
        JsonParamType._parse = _parsing(JsonParamType._parse)
        for kind in (DirParamType, FileParamType):
            kind.convert = _converting(kind.convert)


def _parsing(upstream: Any) -> Any:
    def parse(self: Any, value: Any, param: Any) -> Any:
        content = load_yaml(value) if _is_file(self._python_type, value) else upstream(self, value, param)
        remote = _submitting()
        if remote is not None and self._python_type in _CHANGES:
            return _uploaded(remote, content)
        if remote is not None and self._python_type == dict[str, FlyteDirectory]:
            return {name: _whole(remote, path, f"{param.name}.{name}") for name, path in content.items()}
        return content

    return parse


def _is_file(kind: Any, value: Any) -> bool:
    """Tell if a parameter is a file to read with our errors: flytekit has none for one that is missing, or is not YAML."""
    if not isinstance(value, str):
        return False
    is_ours = isinstance(kind, type) and issubclass(kind, Strict) and not value.lstrip().startswith(("{", "["))
    return is_ours or value.endswith((".yaml", ".yml"))


def _converting(upstream: Any) -> Any:
    def convert(self: Any, value: Any, param: Any, ctx: Any) -> Any:
        remote = _submitting()
        return upstream(self, _whole(remote, value, param.name) if remote is not None else value, param, ctx)

    return convert


def _submitting() -> Any:
    """Return the control plane that a `pyflyte run --remote` is meant for; None in other commands."""
    context = click.get_current_context(silent=True)
    return context.obj.remote_instance() if context is not None and getattr(context.obj, "is_remote", False) else None


def _whole(remote: Any, path: Any, key: str) -> Any:
    """Return the address of a file or folder; flytekit's own upload would put all files of a folder's folders into one."""
    if not isinstance(path, str) or not uploads.is_local(key, path):
        return path
    return _address(remote, uploads.complete(path, f"--{key}", _limit()))


_CHANGES: tuple[Any, ...] = (dict, list[dict])  # type: ignore[type-arg]  # as the workflow has them
"""Types of a sweep's grid and changes."""
TypeEngine.register(RecipeTransformer())
_key = TypeEngine._get_literal_cache_key
# Flytekit keeps the values that it made, by the recipe alone: its files may have changed since, or it was for another place.
TypeEngine._get_literal_cache_key = lambda value, kind: None if isinstance(value, Recipe) else _key(value, kind)
_take_over()
