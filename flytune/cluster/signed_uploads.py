"""Uploads of a recipe's local files to addresses that a cluster's control plane signs; both faces have
one."""

import hashlib
import math
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from tqdm import tqdm
from tqdm.utils import CallbackIOWrapper

from flytune import addresses
from flytune.cluster import folders, uploads
from flytune.cluster.uploads import Local
from flytune.errors import RecipeError, StorageError
from flytune.hardware import load_cluster
from flytune.recipe import Recipe

_CHUNK = 8 * 2**20
# Seconds to connect, and between two bytes.
_TIMEOUT = (10, 300)


class SignedUpload(NamedTuple):
    """One place of the cluster's storage, with an address that takes one upload."""

    address: str
    signed: str
    """Address that is signed, and secret."""
    headers: Mapping[str, str]
    """Headers that the upload must have."""


class AlreadyStoredError(Exception):
    """The answer of a control plane for a stored file, if it is not told the content's hash."""


class Signer(Protocol):
    """A control plane that signs uploads."""

    verify: Any
    """Argument of `requests` by which the storage is verified."""

    def sign(self, root: str, name: str, md5: bytes | None) -> SignedUpload:
        """Sign the upload of the file `name` below `root`.

        Raises:
            AlreadyStoredError: it is stored, and no hash of its content is given.
        """
        ...


def of_recipe(signer: Signer, recipe: Recipe) -> Recipe:
    """Upload the local files of a recipe; return the recipe with addresses in their place.

    Raises:
        RecipeError: what `flytune.cluster.uploads.found` refuses, and folders that pods lack.
        StorageError: a file was not uploaded.
    """
    lacking = folders.problems(recipe, load_cluster(), recipe.hardware.shape, uploaded=False)
    return Recipe.model_validate(of_content(signer, uploads.of_recipe(recipe), lacking))


def of_content(signer: Signer, content: Any, lacking: Sequence[str] = ()) -> Any:
    """Return the content of a recipe or of a sweep's changes, with addresses in place of its local files.

    `lacking` are sentences on folders that pods lack, which are refused together with missing files.
    """
    addresses = {
        (upload.field, upload.path): _address(signer, upload)
        for upload in uploads.found(content, limit(), lacking)
    }
    return uploads.replaced(content, lambda loc, field, path: addresses[field, path])


def of_path(signer: Signer, path: Any, key: str) -> Any:
    """Return the address of an uploaded file or folder with all its subfolders; anything but a local path as
    it is."""
    if not isinstance(path, str) or not uploads.is_local(key, path):
        return path
    return _address(signer, uploads.complete(path, f"--{key}", limit()))


def limit() -> float:
    """Return the upper limit of one submission's uploads, in GiB.

    Raises:
        RecipeError: the variable for it holds no positive number.
    """
    given = os.environ.get(uploads.LIMIT_VARIABLE, "")
    try:
        limit = float(given or uploads.LIMIT_GIB)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        shown = addresses.redact(given)
        raise RecipeError(f"{uploads.LIMIT_VARIABLE}={shown:.60}: give a positive number of GiB")
    return limit


def _address(signer: Signer, local: Local) -> str:
    """Return the address of a local file or folder, which depends on its content; upload only files that are
    not stored yet."""
    with _bar(f"{local.name}: hash", local.size) as bar:
        digests = {name: _digests(file, bar) for name, file in sorted(local.files.items())}
    listed = "".join(f"{sha256} {name}\n" for name, (sha256, _) in digests.items())
    root = hashlib.sha256(listed.encode()).hexdigest()[:32]

    def signed(name: str, md5: bytes | None = None) -> SignedUpload:
        return signer.sign(root, f"{local.name}{name and '/'}{name}", md5)

    # A name that is never uploaded: no address of a stored file is returned.
    address = signed("address").address.removesuffix("/address")
    sent = 0
    with _bar(f"{local.name}: upload", local.size) as bar:
        for name, (_, md5) in digests.items():
            try:
                signed(name)
            except AlreadyStoredError:
                continue
            sent += _put(signer, local.files[name], signed(name, md5), md5, bar, f"{local.key}: {local.path}")
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


def _put(signer: Signer, file: Path, place: SignedUpload, md5: bytes, bar: Any, where: str) -> int:
    import requests

    size = file.stat().st_size
    azure = {"x-ms-blob-type": "BlockBlob"} if place.address.startswith("abfs") else {}
    headers = (
        {"Content-Length": str(size), "Content-MD5": b64encode(md5).decode()} | azure | dict(place.headers)
    )
    with file.open("rb") as content:
        # An empty body has to be bytes: object stores take no chunked requests.
        body = CallbackIOWrapper(bar.update, content, "read") if size else b""
        try:
            done = requests.put(
                place.signed, data=body, headers=headers, verify=signer.verify, timeout=_TIMEOUT
            )
        except requests.RequestException as error:  # the error's text contains the signed address
            raise StorageError(
                f"{where}: {file.name} was not uploaded: {type(error).__name__}; run it again"
            ) from None
    if done.status_code not in (200, 201):
        raise StorageError(
            f"{where}: {file.name} was not uploaded: the cluster's storage answers {done.status_code}"
        )
    return size
