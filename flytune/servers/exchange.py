"""HTTP exchanges with limits of time and size, without redirects, and without a proxy on this machine."""

import queue
import threading
import urllib.parse
import urllib.request
from http.client import HTTPResponse
from typing import Any, NamedTuple

from flytune import addresses
from flytune.files import read_within


class HttpAnswer(NamedTuple):
    """Answer of a server."""

    status: int
    """Code of the answer, also of a refusal or a redirect."""
    body: bytes
    """Content, empty where none was to be read."""


class _EachStatus(urllib.request.HTTPErrorProcessor):
    """Handler that returns each answer as it is. urllib would follow a redirect with the key."""

    def http_response(self, request: urllib.request.Request, response: HTTPResponse) -> HTTPResponse:
        """Return the answer."""
        return response

    https_response = http_response


def answer_to(request: urllib.request.Request, seconds: float, largest: int) -> HttpAnswer:
    """Return the answer to a request, whatever its status.

    A socket's own limit is that of one read: a server that sends a byte from time to time would never reach
    it.

    Args:
        request: the request, whose address is checked by the caller.
        seconds: limit of the whole exchange, from the look-up of the host's name to the last byte.
        largest: bytes of a body that is read; 0 reads none.

    Raises:
        TimeoutError: the exchange takes longer.
        FileRefusedError: the body has more bytes.
        Exception: as urllib and http.client raise it; its text may contain the address.
    """
    ended: queue.SimpleQueue[HttpAnswer | Exception] = queue.SimpleQueue()

    def exchange() -> None:
        try:
            with _open(request, seconds) as response:
                body = read_within(response, largest, "the answer") if largest else b""
                ended.put(HttpAnswer(response.status, body))
        except Exception as error:  # noqa: BLE001 (the other thread raises it)
            ended.put(error)

    # A daemon, so that no process waits for it at its end.
    threading.Thread(target=exchange, name="exchange", daemon=True).start()
    try:
        result = ended.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer in {seconds:g} s") from None
    if isinstance(result, Exception):
        raise result
    return result


def _open(request: urllib.request.Request, seconds: float) -> Any:
    handlers: list[Any] = [_EachStatus]
    if addresses.is_here(urllib.parse.urlsplit(request.full_url).hostname or ""):
        # A proxy of the environment is another machine: it has no way back, and would get the key.
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers).open(request, timeout=seconds)
