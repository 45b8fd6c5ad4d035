"""Servers of models that answer with anything."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from flytune.servers import client
from flytune.serving import endpoint
from tests.fuzz.isolation import OF_ENVIRONMENT, Wrong
from tests.fuzz.kinds import Samples, kind
from tests.fuzz.mutations import damaged, documents, json_bytes, with_equal_keys
from tests.fuzz.oracles import plain_json
from tests.support.json_server import JsonHandler

_TOKENS = {"tokens": [1, 2, 300]}
_ANSWERS: dict[str, dict[str, Any]] = {
    "vllm": {
        "/v1/models": {"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]},
        "/v1/completions": {
            "choices": [
                {"text": "x", "logprobs": {"top_logprobs": [{"token_id:5": -0.5, "token_id:7": -2.0}]}}
            ]
        },
        "/tokenize": _TOKENS,
    },
    "llama.cpp": {
        "/v1/models": {"object": "list", "data": [{"id": "m", "owned_by": "llamacpp"}]},
        "/completion": {
            "completion_probabilities": [
                {"id": 5, "top_logprobs": [{"id": 5, "logprob": -0.5}, {"id": 7, "logprob": -2.0}]}
            ]
        },
        "/tokenize": _TOKENS,
        "/apply-template": {"prompt": "a prompt"},
    },
}
"""Answers of both servers, by path."""
_ENDS = ["moves", "drips", "is endless", "refuses", "breaks"]


def _answers(samples: Samples) -> st.SearchStrategy[tuple[str, str, Any]]:
    """Return what draws a server, one of its paths, and the other answer or end that it has there."""

    def of(server: str, path: str) -> st.SearchStrategy[Any]:
        whole = _ANSWERS[server][path]
        spoiled = documents(whole).map(json_bytes)
        text = st.just(json_bytes(whole))
        bodies = st.one_of(spoiled, text.flatmap(damaged), text.flatmap(with_equal_keys))
        return st.tuples(st.just(server), st.just(path), st.one_of(bodies, bodies, st.sampled_from(_ENDS)))

    places = [(server, path) for server, answers in _ANSWERS.items() for path in answers]
    return st.sampled_from(places).flatmap(lambda place: of(*place))


@kind("served", _answers, share=0.3)
def check_served(samples: Samples, given: tuple[str, str, Any], folder: Path) -> None:
    """An answer of a server is compared as it is, or refused; none costs more than its limits, and the key
    goes nowhere else."""
    server, changed, answer = given
    client.SECONDS = 2.0
    os.environ[client.KEY] = OF_ENVIRONMENT
    bodies = {path: json_bytes(content) for path, content in _ANSWERS[server].items()} | {changed: answer}
    with _serving(bodies) as (address, elsewhere):
        try:
            asked = endpoint.connect(address)
            results = asked.next_tokens([1, 2]), asked.tokens("a text"), asked.chat_tokens([])
        finally:
            if elsewhere:
                raise Wrong(f"a redirect was followed: {elsewhere[0]!r:.200}")
    listed, tokens, chat = results
    if listed != _listed(server, bodies):
        raise Wrong(f"next tokens are {listed!r:.200}, and the server says {answer!r:.200}")
    # Where it refuses, its tokens are not known.
    said = None if bodies["/tokenize"] in _ENDS else plain_json(bodies["/tokenize"])["tokens"]
    if tokens != said or (isinstance(chat, list) and chat != said):
        raise Wrong(f"tokens are {tokens!r:.200} and {chat!r:.200}, and the server says {said!r:.200}")


def _listed(server: str, bodies: dict[str, Any]) -> dict[int, float]:
    if server == "vllm":
        first = plain_json(bodies["/v1/completions"])["choices"][0]["logprobs"]["top_logprobs"][0]
        return {int(name.removeprefix("token_id:")): value for name, value in first.items()}
    first = plain_json(bodies["/completion"])["completion_probabilities"][0]["top_logprobs"]
    return {token["id"]: token["logprob"] for token in first}


@contextlib.contextmanager
def _serving(bodies: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Serve answers by path; provide the address, and the requests that a redirect has led to."""
    elsewhere: list[str] = []

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            if self.path == "/elsewhere":
                elsewhere.append(str(self.headers))
            self._end(bodies.get(self.path, b"{}"))

        def do_POST(self) -> None:
            json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.do_GET()

        def _end(self, answer: Any) -> None:
            if isinstance(answer, bytes):
                self._send(200, answer)
            elif answer == "moves":
                self._send(302, b"", {"Location": "/elsewhere"})
            elif answer == "refuses":
                self._send(400, {"error": {"message": f"\x1b[31mno{self.headers['Authorization']}"}})
            elif answer != "breaks":
                self._stream(answer)

        def _stream(self, answer: str) -> None:
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")
                while True:
                    self.wfile.write(b" " * (1 if answer == "drips" else 2**20))
                    time.sleep(0.1 if answer == "drips" else 0)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        listening.block_on_close = False
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}", elsewhere
        listening.shutdown()
