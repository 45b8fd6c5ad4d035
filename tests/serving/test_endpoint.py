"""Endpoints that are down, slow, hostile, or no servers of models: one line, within limits, and no key goes
elsewhere."""

import socket
import threading
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer

import pytest

from flytune.errors import ServingError
from flytune.servers import client
from flytune.serving import endpoint
from tests.support.json_server import JsonHandler
from tests.support.model_server import ModelServer, started

KEY = "a-key-of-the-server"
MODELS = {"data": [{"id": "m", "owned_by": "vllm"}]}
LLAMA = {"data": [{"id": "m", "owned_by": "llamacpp"}]}


@contextmanager
def serving(answers):
    """Serve (status, content, headers) by path, and provide the address and the requests."""
    requests = []

    class Handler(JsonHandler):
        def do_GET(self):
            requests.append((self.path, self.headers.get("Authorization")))
            self._send(*answers.get(self.path, (404, {"detail": "Not Found"})))

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}", requests
        listening.shutdown()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {"detail": "Not Found"}), "answered 404: .*Not Found.*; it is no server of vLLM or llama.cpp"),
        ((503, {"error": {"message": "Loading model"}}), "answered 503: Loading model; see the server's log"),
        ((302, b"", {"Location": "http://example.org/v1/models"}), "answered 302, a redirect, which is not"),
        ((401, {}), "answered 401: it wants a key: set FLYTUNE_API_KEY"),
        ((200, b"<html>"), "answered what is not JSON"),
        ((200, b"[" * 100_000), "answered what is not JSON"),
        ((200, b'{"data": [{"id": NaN}]}'), "answered what is not JSON"),
        ((200, {"data": "x"}), "answered without what a server of vLLM or llama.cpp has: data"),
        ((200, {"data": [{"id": 5}]}), r"llama.cpp has: data.0.id"),
        ((200, {"data": []}), "lists no model"),
        (
            (200, {"data": [{"id": "m"}, {"id": "n\x1b[31m"}]}),
            r"has several models; name one by --model: 'm', ",
        ),
        ((200, b" " * (client.LARGEST + 1)), "answered more than the 4,194,304 bytes that are read"),
    ],
)
def test_what_is_no_server_of_models_is_said_in_a_line(answer, words, monkeypatch):
    monkeypatch.delenv(client.KEY, raising=False)
    with serving({"/v1/models": answer}) as (address, _), pytest.raises(ServingError, match=words) as raised:
        endpoint.connect(address)
    assert str(raised.value).startswith(f"{address}/v1/models: ")
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"choices": []},
        {"choices": [{"logprobs": None}]},
        {"choices": [{"logprobs": {"top_logprobs": []}}]},
        {"choices": [{"logprobs": {"top_logprobs": [{}]}}]},
        {"choices": [{"logprobs": {"top_logprobs": [{"token_id:1": "x"}]}}]},
        {"choices": [{"logprobs": {"top_logprobs": [{"token_id:1": 5.0}]}}]},
        {"choices": [{"logprobs": {"top_logprobs": [{" hello": -1.0}]}}]},
        {"choices": [{"logprobs": {"top_logprobs": [{"token_id:-1": -1.0}]}}]},
        {"choices": [{"logprobs": {"top_logprobs": [{f"token_id:{10**40}": -1.0}]}}]},
    ],
)
def test_answers_of_another_form_are_refused(content):
    tokens = {"completion_probabilities": [{"top_logprobs": [{"id": -1, "logprob": -1.0}]}]}
    for models, path, answer in (
        (MODELS, "/v1/completions", content),
        (LLAMA, "/completion", content),
        (LLAMA, "/completion", tokens),
    ):
        with serving({"/v1/models": (200, models), path: (200, answer)}) as (address, _):
            server = endpoint.connect(address)
            with pytest.raises(ServingError, match=f"{path}: (answered without|lists tokens by their texts)"):
                server.next_tokens([1, 2])


def test_a_refused_prompt_is_said_with_the_servers_words():
    refusal = 400, {"object": "error", "message": "Token id 9 is out of vocabulary"}
    for models, path in ((MODELS, "/v1/completions"), (LLAMA, "/completion")):
        words = "answered 400: Token id 9 is out of vocabulary"
        with (
            serving({"/v1/models": (200, models), path: refusal}) as (address, _),
            pytest.raises(ServingError, match=words),
        ):
            endpoint.connect(address).next_tokens([9])


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost:8000",
        "file:///etc/hostname",
        "http://",
        "http://[::1",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://127.0.0.1/?a=b",
        "http://127.0.0.1/#a",
        "http://127.0.0.1/a b",
    ],
)
def test_what_is_no_address_of_a_server_is_refused(address):
    with pytest.raises(ServingError, match=r"the server's address, .*: not one of http:// or https://"):
        endpoint.connect(address)


def test_credentials_in_an_address_are_refused():
    with pytest.raises(ServingError, match="an address with credentials") as raised:
        endpoint.connect("http://me:my-password@127.0.0.1")
    assert "my-password" not in str(raised.value)


def test_a_server_that_is_down_is_said_in_a_line():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(
        ServingError, match=f"{address}/v1/models: cannot be reached .*refused.*; start the server"
    ):
        endpoint.connect(address)


def test_a_server_that_answers_byte_by_byte_is_left_at_the_limit(monkeypatch):
    monkeypatch.setattr(client, "SECONDS", 0.5)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip():
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                # Each byte comes long before the limit of one read, until the client has given up.
                while not over.wait(0.05):
                    connection.sendall(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        threading.Timer(20, over.set).start()  # without a limit the answer would end after that
        with pytest.raises(ServingError, match="no answer within 0.5 s"):
            endpoint.connect(f"http://127.0.0.1:{server.getsockname()[1]}")
        over.set()
        thread.join()


def test_a_server_on_this_machine_is_asked_without_the_proxy_of_the_environment(monkeypatch):
    monkeypatch.setenv(client.KEY, KEY)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving({}) as (proxy, passed), serving({"/v1/models": (200, MODELS)}) as (address, asked):
        monkeypatch.setenv("http_proxy", proxy)
        endpoint.connect(address)
        with pytest.raises(ServingError, match="answered 404"):
            endpoint.connect("http://elsewhere.invalid")
    assert asked == [("/v1/models", f"Bearer {KEY}")]
    assert [path for path, _ in passed] == ["http://elsewhere.invalid/v1/models"]


def test_the_key_goes_to_the_server_alone(monkeypatch):
    monkeypatch.setenv(client.KEY, KEY)
    with serving({"/v1/models": (200, MODELS)}) as (target, followed):
        moved = {"/v1/models": (307, b"", {"Location": f"{target}/v1/models"})}
        with serving(moved) as (address, requests), pytest.raises(ServingError, match="a redirect, which"):
            endpoint.connect(address)
    assert (requests, followed) == ([("/v1/models", f"Bearer {KEY}")], [])
    for status, words in (
        (403, "answered 403: the key in FLYTUNE_API_KEY is another"),
        (500, r"answered 500: no \[hidden\]"),
    ):
        with (
            serving({"/v1/models": (status, {"error": f"no {KEY}"})}) as (address, _),
            pytest.raises(ServingError, match=words),
        ):
            endpoint.connect(address)
    with started(ModelServer("vllm", {"m": None}, None, key=KEY)) as server:
        assert endpoint.connect(server.address).model == "m"


@pytest.mark.parametrize("key", ["a\nb", "ключ-сервера"])
def test_a_key_that_no_header_takes_is_refused_unseen(key, monkeypatch):
    monkeypatch.setenv(client.KEY, key)
    with pytest.raises(ServingError, match="^FLYTUNE_API_KEY: has characters that no HTTP header takes"):
        endpoint.connect("http://127.0.0.1:1")


def test_a_model_that_is_not_there_is_said_with_those_that_are():
    words = "has no model 'x', but 'm'"
    with serving({"/v1/models": (200, MODELS)}) as (address, _), pytest.raises(ServingError, match=words):
        endpoint.connect(address, "x")
