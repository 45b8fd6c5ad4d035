"""vLLM's API: what is asked, and answers that no server should give."""

import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import pytest

from flytune.errors import ServingError, TrainingError
from flytune.rollouts import Drawing, VllmServer, WantedAnswer, key_of
from flytune.servers import Client
from tests.support.json_server import JsonHandler

DRAWING = Drawing(ends=(9,), pad=0)
WANTED = [WantedAnswer([1, 2], key_of(0, 1, [1, 2], 0), 3)]


@contextmanager
def serving(answers):
    """Serve (status, content) by path."""

    class Handler(JsonHandler):
        def do_GET(self):
            self._send(*answers.get(self.path, (404, {"detail": "Not Found"})))

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield VllmServer(Client(f"http://127.0.0.1:{listening.server_port}"))
        listening.shutdown()


def answer(**changes):
    choice = {"token_ids": [3, 9], "logprobs": {"token_logprobs": [-1.0, -0.5]}, "finish_reason": "stop"}
    model = changes.pop("model", "m")
    return {"/v1/completions": (200, {"model": model, "choices": [choice | changes]})}


def test_an_answer_has_its_tokens_and_log_probabilities():
    with serving(answer()) as server:
        (drawn,) = server.draw("m", WANTED, DRAWING)
    assert (drawn.tokens, drawn.log_probs, drawn.is_truncated) == ([3, 9], [-1.0, -0.5], False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "base"}, "an answer of model 'base', not of m"),
        ({"finish_reason": "abort"}, "which ended by 'abort', not by a token or its length"),
        ({"token_ids": []}, "of 0 tokens, 2 with log-probabilities, not 1 to 3"),
        ({"token_ids": [3, 3, 3, 9]}, "of 4 tokens, 2 with log-probabilities, not 1 to 3"),
        ({"token_ids": [9, 3]}, r"which ended with token 3, which is none of the ends \[9\]"),
        ({"logprobs": {"token_logprobs": [-1.0, None]}}, "with a log-probability that is none"),
    ],
)
def test_an_answer_that_was_not_asked_for_is_refused(changes, said):
    with serving(answer(**changes)) as server, pytest.raises(TrainingError, match=said):
        server.draw("m", WANTED, DRAWING)


def test_a_server_without_the_calls_of_training_is_named():
    with serving({}) as server:
        with pytest.raises(ServingError, match="/weight_info: the server does not have it; start"):
            server.weights()
        with pytest.raises(ServingError, match="/v1/load_lora_adapter: answered 404: .*Not Found"):
            server.load_adapter("a", "/folder")


def test_a_server_of_adapters_alone_has_no_base():
    models = {"data": [{"id": "a", "parent": "b", "max_model_len": None}]}
    with serving({"/v1/models": (200, models)}) as server, pytest.raises(ServingError, match="lists no base"):
        server.base()
