"""Messages of how a run ended: in Slack's form, and without the address ever being seen."""

import contextlib
import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from flytune.artifacts import notify
from flytune.records import Metrics, Score
from tests.support.plans import recipe_of
from tests.support.reports import metrics

SECRET = "T0P/S3CRET"


@pytest.fixture
def webhook(monkeypatch):
    """Provide the bodies posted to a server whose path is the secret; its answer can be set."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(server.status)
            self.end_headers()

        def log_message(self, *args):
            """Silent."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.status = 200
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(notify.WEBHOOK, f"http://127.0.0.1:{server.server_port}/{SECRET}")
    yield got, server
    server.shutdown()
    server.server_close()


def wishes(*on, webhook=True):
    return recipe_of(notify={"webhook": webhook, "on": list(on)})


def test_who_asks_is_told(webhook):
    got, _ = webhook
    assert notify.send(wishes("failed"), "failed", "it broke")
    assert got == [(f"/{SECRET}", {"text": "it broke"})]
    assert not notify.send(wishes("failed"), "succeeded", "done")
    assert not notify.send(wishes("failed", webhook=False), "failed", "it broke")
    assert notify.send(wishes("succeeded"), "succeeded", "begin" + "x" * 99_999 + "end")
    text = got[1][1]["text"]
    assert text.startswith("begin")
    assert text.endswith("end")
    assert len(text) <= 12_000
    assert len(got) == 2


def test_no_credential_is_told(webhook):
    got, server = webhook
    assert notify.send(
        wishes("failed"), "failed", f"posting to http://127.0.0.1:{server.server_port}/{SECRET} failed"
    )
    assert SECRET not in got[0][1]["text"]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (None, "no FLYTUNE_WEBHOOK is set"),
        (f"{SECRET} is no address", "no address of https:// or http://, so no message was sent"),
        (f"data:,{SECRET}", "no address of https:// or http://, so no message was sent"),
        (f"http://127.0.0.1:1/{SECRET}", "was not reached: URLError; no message was sent"),
        (f"http://[{SECRET}", "was not reached: ValueError; no message was sent"),
        (f"http://127.0.0.1:80/a b {SECRET}", "was not reached: InvalidURL; no message was sent"),
    ],
)
def test_what_goes_wrong_is_a_warning_that_shows_no_address(address, said, monkeypatch, caplog):
    if address is None:
        monkeypatch.delenv(notify.WEBHOOK, raising=False)
    else:
        monkeypatch.setenv(notify.WEBHOOK, address)
    assert not notify.send(wishes("failed"), "failed", "it broke")
    assert said in caplog.text
    assert SECRET not in caplog.text


def test_an_address_that_refuses_is_a_warning(webhook, caplog):
    webhook[1].status = 404
    assert not notify.send(wishes("failed"), "failed", "it broke")
    assert "answered 404, so no message was sent" in caplog.text
    assert SECRET not in caplog.text


def test_what_is_told_of_an_artifact():
    def score(perplexity):
        return Score(
            loss=1, loss_low=1, loss_high=1, perplexity=perplexity, perplexity_low=1, perplexity_high=1
        )

    metrics = Metrics(
        base=score(39.8),
        tuned=score(21.3),
        loss_difference=-0.63,
        loss_difference_low=-0.7,
        loss_difference_high=-0.5,
        samples=5,
        tokens=9,
        loaded_as="nf4",
        answers=[],
        seconds=1,
    )
    said = notify.success_message(recipe_of(), metrics, "s3://bucket/x", [])
    assert (
        "Held-out perplexity 39.80 -> 21.30; loss -0.6300 nats per token (-0.7000 to -0.5000): significantly "
        "better." in said
    )
    assert said.endswith("Artifact: s3://bucket/x")
    older = metrics.model_dump(exclude={"figures"}) | {"loss_difference_high": 0.1}
    unclear = notify.success_message(recipe_of(), Metrics.model_validate(older), str(Path("x")), [])
    assert "not significantly better" in unclear
    refused = notify.success_message(recipe_of(), metrics, "s3://bucket/x", ["arc_easy fell"])
    assert refused.endswith("Artifact: s3://bucket/x\nNot published or promoted: arc_easy fell")
    unmeasured = notify.success_message(
        recipe_of(), metrics.model_copy(update={"figures": []}), "s3://bucket/x", []
    )
    assert "done. No samples were held out, so nothing was measured.\nArtifact: s3://bucket/x" in unmeasured


def test_a_server_that_answers_byte_by_byte_is_left_at_the_limit_of_the_whole_exchange(monkeypatch, caplog):
    monkeypatch.setattr(notify, "SECONDS", 0.5)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip():
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                # Each byte comes long before the limit of one read, until the sender has given up.
                while not over.wait(0.05):
                    connection.sendall(b"a")
                connection.sendall(b"\r\n\r\n")

        thread = threading.Thread(target=drip)
        thread.start()
        monkeypatch.setenv(notify.WEBHOOK, f"http://127.0.0.1:{server.getsockname()[1]}/{SECRET}")
        threading.Timer(20, over.set).start()  # without a limit the message would be accepted after that
        assert not notify.send(wishes("failed"), "failed", "it broke")
        over.set()
        thread.join()
    assert "was not reached: TimeoutError; no message was sent" in caplog.text


def test_a_single_sample_and_a_doubt_are_told():
    unknown = (-0.1, -sys.float_info.max, sys.float_info.max)
    measured = metrics(unknown, samples=1).model_copy(update={"doubts": ["2 of 3 samples were cut"]})
    said = notify.success_message(wishes(), measured, "s3://b/x", [])
    assert "loss -0.1000 nats per token (no interval): not significantly better." in said
    assert (
        "In doubt: 2 of 3 samples were cut; a single held-out sample is no evidence, and has no interval."
        in said
    )
