"""What the hub says no with, and what to do about it. A token is never told."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flytune.errors import ExportError
from flytune.recipe.sections import HUB_ADDRESS

SCHEME = "hf://"
_PASSING = {412, 500, 502, 503, 504}
_NO_TOKEN = (
    "set HF_TOKEN to one with write access (on a cluster: secrets.hub in cluster.yaml, for every_save secrets.tracking too), "
    "or run `hf auth login`"
)


def check(address: str) -> None:
    """Whether the hub knows the token that publishing to an address hf://owner/name takes; asked before training.

    Raises:
        ExportError: why not, and what to do.
    """
    with told(address) as api:
        api.whoami()


def repository(address: str) -> str:
    """`owner/name` of an address hf://owner/name.

    Raises:
        ExportError: it is none.
    """
    if not HUB_ADDRESS.fullmatch(address):
        raise ExportError(f"publish.address: {address}: not a model repository of the hub: write hf://owner/name")
    return address.removeprefix(SCHEME)


def taken(address: str, files: list[str]) -> ExportError:
    """Of a repository that somebody else has filled."""
    shown = ", ".join(files[:3]) + (" ..." if len(files) > 3 else "")
    return ExportError(
        f"publish.address: {address}: main holds {shown}, which Flytune has not published; it is left as it is: give a "
        "repository that is not there yet, an empty one, or one that Flytune has published to"
    )


@contextmanager
def told(address: str) -> Iterator[Any]:
    """Gives huggingface_hub's HfApi, whose refusals come out as ExportErrors.

    Raises:
        ExportError: the address is none, there is no token, or what the hub refuses, and what to do.
    """
    repository(address)
    from huggingface_hub import HfApi, constants, get_token

    token = get_token()
    if not token:
        raise ExportError(f"publish.address: {address}: there is no token: {_NO_TOKEN}")
    api = HfApi(token=token)
    # Who publishes means the hub, in pods too whose models must not come from there (HF_HUB_OFFLINE).
    offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        yield api
    except ExportError:
        raise
    except Exception as error:  # noqa: BLE001 (HTTP errors of two libraries, OSErrors and ValueErrors: told apart by _reason)
        reason = _reason(error, api, repository(address)).replace(token, "***")
        # Without its cause, whose text may hold signed addresses and headers.
        raise ExportError(f"publish.address: {address}: {reason}") from None
    finally:
        constants.HF_HUB_OFFLINE = offline


def is_passing(error: BaseException) -> bool:
    """Whether the same may work in a moment: another commit came in between, or the hub is briefly away."""
    return _status(error) in _PASSING


def _reason(error: Exception, api: Any, name: str) -> str:
    if _is_unreachable(error):
        why = "HF_HUB_OFFLINE is set" if _is_offline() else "no network from here, or HF_ENDPOINT is wrong"
        return f"the hub cannot be reached ({why}); run it again when it can: what is uploaded is not uploaded again"
    # Of the hub itself: the storage that files go to has refusals of its own, which huggingface_hub wraps.
    if (status := getattr(getattr(error, "response", None), "status_code", None)) in (401, 403) or _is_hidden(error):
        return _refused(api, name, int(status or 404))
    if is_passing(error):
        return f"the hub answers {_status(error)}; run it again: what is uploaded is not uploaded again"
    text = re.sub(r"\?\S+", "?...", " ".join(str(error).split()))[:300].rstrip(".")
    return f"cannot be published: {type(error).__name__}: {text}; run again, it goes on with what is not uploaded yet"


def _refused(api: Any, name: str, status: int) -> str:
    owner = name.partition("/")[0]
    try:
        account = api.whoami()
    except Exception as error:  # noqa: BLE001 (the question only helps to say why)
        if _status(error) == 401:
            return "the hub does not know the token (revoked, expired or cut short?): " + _NO_TOKEN
        return f"the hub refuses ({status}); is the token one with write access to {name}?"
    names = [account["name"], *(organization["name"] for organization in account.get("orgs", []))]
    if owner not in names:
        return f"{owner} is neither the token's account nor one of its organizations; it may write below: {', '.join(names)}"
    return f"the token of {account['name']} may not write there; {_NO_TOKEN}"


def _is_hidden(error: BaseException) -> bool:
    return type(error).__name__ in {"RepositoryNotFoundError", "GatedRepoError", "DisabledRepoError"}


def _status(error: BaseException) -> int | None:
    for link in _chain(error):
        if (status := getattr(getattr(link, "response", None), "status_code", None)) is not None:
            return int(status)
    return None


def _is_unreachable(error: BaseException) -> bool:
    away = ("OfflineModeIsEnabled", "ConnectError", "ConnectTimeout", "ReadError", "WriteError", "RemoteProtocolError")
    return any(type(link).__name__ in away or isinstance(link, (ConnectionError, TimeoutError)) for link in _chain(error))


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"}


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
