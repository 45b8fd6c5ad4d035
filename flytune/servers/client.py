"""Client of a server of models: its key, and limits of what it answers."""

import json
import os
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from flytune import addresses, json_core
from flytune.errors import ServingError
from flytune.files import FileRefusedError
from flytune.servers.exchange import HttpAnswer, answer_to

KEY = "FLYTUNE_API_KEY"
"""Environment variable with the server's key."""
SECONDS = 120.0
"""Limit of one exchange."""
LARGEST = 4 * 2**20
"""Bytes of an answer that are read."""
_SHOWN = 300


class Form(BaseModel):
    """Part of an answer that is read; the rest of it is not."""

    model_config = ConfigDict(strict=True, extra="ignore")


_Kind = TypeVar("_Kind", bound=Form)


class Refusal(NamedTuple):
    """Answer of a server that does not do what it was asked."""

    status: int
    text: str
    """Message of the answer in one line."""

    @property
    def is_missing(self) -> bool:
        """True if the server has nothing at the path, or not for this method."""
        return self.status in (404, 405, 501)


class Client:
    """HTTP client of one server: a request at a time, no redirect, and limits of time and size."""

    def __init__(
        self, address: str, key: str | None = None, seconds: float | None = None, largest: int | None = None
    ) -> None:
        """Check the address and the key.

        Args:
            address: http://HOST:PORT, with or without /v1.
            key: the server's key; by default that of the variable KEY.
            seconds: limit of one exchange; by default SECONDS.
            largest: bytes of an answer that are read; by default LARGEST.

        Raises:
            ServingError: one of them cannot be used.
        """
        self._seconds, self._largest = seconds, largest
        addresses.check(address, "the server's address", ServingError)
        try:
            parts = urllib.parse.urlsplit(address)
            is_whole = parts.scheme in ("http", "https") and bool(parts.hostname)
            has_port = parts.port != 0
        except ValueError:
            is_whole = has_port = False
        if not (is_whole and has_port) or parts.query or parts.fragment or " " in address:
            raise ServingError(
                f"the server's address, {address!r:.200}: not one of http:// or https://; "
                "write http://HOST:PORT"
            )
        self.address = address.rstrip("/").removesuffix("/v1").rstrip("/")
        self._key = os.environ.get(KEY, "") if key is None else key
        if not (self._key.isascii() and self._key.isprintable()):
            raise ServingError(f"{KEY}: has characters that no HTTP header takes; set it again")

    def get(self, path: str, kind: type[_Kind]) -> _Kind | Refusal:
        """Return what is at a path.

        Raises:
            ServingError: there is no answer within the limits, or it has not this form.
        """
        return self._read(path, None, kind)

    def post(self, path: str, content: Mapping[str, Any], kind: type[_Kind]) -> _Kind | Refusal:
        """Return the answer to a JSON object.

        Raises:
            ServingError: as `get`.
        """
        return self._read(path, json.dumps(content).encode(), kind)

    def order(self, path: str, content: Mapping[str, Any] | None = None) -> Refusal | None:
        """Return the refusal of a JSON object, or of a path alone, whose answer says nothing; None where it
        was accepted.

        Raises:
            ServingError: as `get`, but for the form.
        """
        body = self._accepted(path, None if content is None else json.dumps(content).encode())
        return body if isinstance(body, Refusal) else None

    def error(self, path: str, problem: str) -> ServingError:
        """Return an error of this server."""
        return ServingError(f"{self.address}{path}: {problem}")

    def refused(self, path: str, refusal: Refusal) -> ServingError:
        """Return the error of what the server refuses."""
        what = f"answered {refusal.status}"
        if refusal.text:
            what += f": {refusal.text}"
        if refusal.is_missing:
            what += "; it is no server of vLLM or llama.cpp, or has another address"
        return self.error(path, what)

    def _accepted(self, path: str, content: bytes | None) -> bytes | Refusal:
        """Return the body of an answer, or the server's refusal."""
        status, body = self._answer(path, content)
        if 300 <= status < 400:
            raise self.error(path, f"answered {status}, a redirect, which is not followed; name its target")
        if status in (401, 403):
            todo = f"the key in {KEY} is another" if self._key else f"it wants a key: set {KEY}"
            raise self.error(path, f"answered {status}: {todo}")
        if status >= 500:
            raise self.error(path, f"answered {status}: {_line(body)}; see the server's log")
        if status != 200:
            return Refusal(status, _line(body))
        return body

    def _read(self, path: str, content: bytes | None, kind: type[_Kind]) -> _Kind | Refusal:
        body = self._accepted(path, content)
        if isinstance(body, Refusal):
            return body
        try:
            return kind.model_validate(json_core.load_object(body, len(body)))
        except json_core.JSONError as error:
            raise self.error(path, f"answered what is not JSON ({error}); name a server of models") from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise self.error(
                path, f"answered without what a server of vLLM or llama.cpp has: {where:.80}: {first['msg']}"
            ) from None

    def _answer(self, path: str, content: bytes | None) -> HttpAnswer:
        headers = {"Accept": "application/json"}
        if content is not None:
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        seconds = SECONDS if self._seconds is None else self._seconds
        try:
            request = urllib.request.Request(f"{self.address}{path}", content, headers)
            return answer_to(request, seconds, self._largest or LARGEST)
        except FileRefusedError as error:
            raise self.error(path, f"answered {error}") from None
        except Exception as error:  # noqa: BLE001 (http.client's own, OSErrors, ValueErrors of an address)
            if _is_slow(error):
                raise self.error(path, f"no answer within {seconds:g} s; see the server's log") from None
            raise self.error(
                path,
                f"cannot be reached ({addresses.reason(error)}); start the server, or correct the address",
            ) from None


def _is_slow(error: Exception) -> bool:
    return isinstance(getattr(error, "reason", error), TimeoutError)


def _line(body: bytes) -> str:
    """Return the message in a refusal, in one line."""
    text = body[: 100 * _SHOWN].decode("utf-8", "replace")
    try:
        content = json_core.load_object(body, LARGEST)
        inner = content.get("error", content)
        text = str(inner.get("message", text) if isinstance(inner, dict) else inner)
    except json_core.JSONError:
        pass
    return " ".join(text.split())[:_SHOWN]
