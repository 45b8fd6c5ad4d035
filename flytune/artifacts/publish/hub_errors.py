"""Errors of the hub, with what to do about them. Messages never contain the token."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flytune import patches
from flytune.errors import ExportError, chain
from flytune.recipe.sections import HUB_ADDRESS

SCHEME = "hf://"
_PASSING = {412, 500, 502, 503, 504}
_NO_TOKEN = (
    "set HF_TOKEN to one with write access (on a cluster: secrets.hub in cluster.yaml, for every_save "
    "secrets.tracking too), or run `hf auth login`"
)


def check(address: str) -> None:
    """Check before training that the hub knows the token for an address hf://owner/name.

    Raises:
        ExportError: it does not, or cannot be asked, and what to do.
    """
    with open_api(address) as api:
        api.whoami()


def repository(address: str, where: str = "publish.address: ") -> str:
    """Return `owner/name` of an address hf://owner/name, which is written at `where`.

    Raises:
        ExportError: the address has another form.
    """
    if not HUB_ADDRESS.fullmatch(address):
        raise ExportError(f"{where}{address}: not a model repository of the hub: write hf://owner/name")
    return address.removeprefix(SCHEME)


def foreign_files(address: str, files: list[str]) -> ExportError:
    """Return the error for a repository with files that Flytune did not publish."""
    shown = ", ".join(files[:3]) + (" ..." if len(files) > 3 else "")
    return ExportError(
        f"publish.address: {address}: main has {shown}, which Flytune did not publish; nothing was changed: "
        "give a repository that does not exist yet, an empty one, or one that Flytune has published to"
    )


@contextmanager
def open_api(address: str) -> Iterator[Any]:
    """Yield huggingface_hub's HfApi; its errors within the block become ExportErrors.

    Raises:
        ExportError: the address is invalid, there is no token, or the hub refuses something, and what to do.
    """
    repository(address)
    from huggingface_hub import HfApi, get_token

    token = get_token()
    if not token:
        raise ExportError(f"publish.address: {address}: there is no token: {_NO_TOKEN}")
    api = HfApi(token=token)
    # Publishing needs the hub even in pods that must not load models from it (HF_HUB_OFFLINE).
    try:
        with patches.huggingface_hub.OFFLINE.replaced(False):
            yield api
    except ExportError:
        raise
    except Exception as error:  # noqa: BLE001 (HTTP errors of two libraries, OSErrors and ValueErrors: _reason distinguishes them)
        reason = _reason(error, api, repository(address)).replace(token, "***")
        # Without its cause, whose text may contain signed addresses and headers.
        raise ExportError(f"publish.address: {address}: {reason}") from None


def is_passing(error: BaseException) -> bool:
    """Return whether a retry may succeed: another commit came first, or the hub is briefly unavailable."""
    return _status(error) in _PASSING


def _reason(error: Exception, api: Any, name: str) -> str:
    if _is_unreachable(error):
        why = "HF_HUB_OFFLINE is set" if _is_offline() else "no network from here, or HF_ENDPOINT is wrong"
        return (
            f"the hub cannot be reached ({why}); run it again when it can: uploaded files are not sent again"
        )
    # Errors of the hub itself: huggingface_hub wraps those of the storage that receives the files.
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403) or _is_hidden(error):
        return _refused(api, name, int(status or 404))
    if is_passing(error):
        return f"the hub answers {_status(error)}; run it again: uploaded files are not sent again"
    text = re.sub(r"\?\S+", "?...", " ".join(str(error).split()))[:300].rstrip(".")
    return (
        f"cannot be published: {type(error).__name__}: {text}; run it again: uploaded files are not sent "
        "again"
    )


def _refused(api: Any, name: str, status: int) -> str:
    owner = name.partition("/")[0]
    try:
        account = api.whoami()
    except Exception as error:  # noqa: BLE001 (this request only serves the message)
        if _status(error) == 401:
            return "the hub does not know the token (revoked, expired or cut short?): " + _NO_TOKEN
        return f"the hub refuses ({status}); is the token one with write access to {name}?"
    names = [account["name"], *(organization["name"] for organization in account.get("orgs", []))]
    if owner not in names:
        return (
            f"{owner} is neither the token's account nor one of its organizations; it may write below: "
            f"{', '.join(names)}"
        )
    return f"the token of {account['name']} may not write there; {_NO_TOKEN}"


def _is_hidden(error: BaseException) -> bool:
    return type(error).__name__ in {"RepositoryNotFoundError", "GatedRepoError", "DisabledRepoError"}


def _status(error: BaseException) -> int | None:
    for link in chain(error):
        if (status := getattr(getattr(link, "response", None), "status_code", None)) is not None:
            return int(status)
    return None


def _is_unreachable(error: BaseException) -> bool:
    away = (
        "OfflineModeIsEnabled",
        "ConnectError",
        "ConnectTimeout",
        "ReadError",
        "WriteError",
        "RemoteProtocolError",
    )
    return any(
        type(link).__name__ in away or isinstance(link, (ConnectionError, TimeoutError))
        for link in chain(error)
    )


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"}
