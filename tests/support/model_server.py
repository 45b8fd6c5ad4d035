"""Stand-in for vLLM and llama.cpp's server: their requests and answers, by a model of transformers in this
process.

tests/served starts the real ones.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from tests.support.json_server import JsonHandler


@dataclass
class ModelServer:
    """Models of the server, and the requests to it."""

    dialect: str
    models: Mapping[str, Any]
    """Models by their names."""
    tokenizer: Any
    most: int = 20
    """Largest number of next tokens that it lists (vLLM's --max-logprobs)."""
    has_tokenize: bool = True
    key: str = ""
    shown: Callable[[dict[int, float]], dict[int, float]] = lambda tokens: tokens
    """Function that changes the next tokens of a prompt before they are shown."""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Paths of all requests, and their contents."""
    address: str = ""

    def answer(self, path: str, content: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and content of an answer."""
        self.asked.append((path, content))
        if path == "/v1/models":
            owner = {"vllm": "vllm", "llama.cpp": "llamacpp"}[self.dialect]
            return 200, {"object": "list", "data": [{"id": name, "owned_by": owner} for name in self.models]}
        answers = _VLLM if self.dialect == "vllm" else _LLAMA
        if path not in answers or (path in ("/tokenize", "/apply-template") and not self.has_tokenize):
            return 404, {"detail": "Not Found"}
        return answers[path](self, content)

    def next_tokens(self, content: dict[str, Any], count: int) -> dict[int, float]:
        """Return the likeliest tokens after the prompt, which is a list of ids."""
        import torch

        prompt = content["prompt"]
        assert all(type(token) is int for token in prompt)
        model = self.models[content["model"]]
        with torch.no_grad():
            row = model(torch.tensor([prompt])).logits[0, -1].log_softmax(dim=-1)
        values, ids = row.topk(count)
        return self.shown(dict(zip(ids.tolist(), values.tolist(), strict=True)))

    def rendered(self, content: dict[str, Any]) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                content["messages"], add_generation_prompt=True, tokenize=False
            )
        )


def _vllm_completion(server: ModelServer, content: dict[str, Any]) -> tuple[int, Any]:
    if content["logprobs"] > server.most:
        message = f"Requested sample logprobs of {content['logprobs']}, which is greater than max allowed"
        return 400, {"error": {"message": message, "type": "BadRequestError", "code": 400}}
    assert content["max_tokens"] == 1
    assert content["return_tokens_as_token_ids"] is True
    assert "prompt_logprobs" not in content
    listed = server.next_tokens(content, content["logprobs"])
    named = {f"token_id:{token}": value for token, value in listed.items()}
    first = next(iter(named))
    logprobs = {"text_offset": [0], "token_logprobs": [named[first]], "tokens": [first]}
    logprobs["top_logprobs"] = [named]
    choice = {"index": 0, "text": "x", "logprobs": logprobs, "finish_reason": "length"}
    return 200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


def _vllm_tokenize(server: ModelServer, content: dict[str, Any]) -> tuple[int, Any]:
    text = content["prompt"] if "prompt" in content else server.rendered(content)
    tokens = server.tokenizer(text, add_special_tokens=content.get("add_special_tokens", False))["input_ids"]
    return 200, {"count": len(tokens), "max_model_len": 256, "tokens": tokens, "token_strs": None}


def _llama_completion(server: ModelServer, content: dict[str, Any]) -> tuple[int, Any]:
    assert content["n_predict"] == 1
    assert content["cache_prompt"] is False
    listed = [
        {"id": token, "token": "x", "bytes": [120], "logprob": value}
        for token, value in server.next_tokens(content, content["n_probs"]).items()
    ]
    drawn = [listed[0]["id"]]
    for text, bias in content.get("logit_bias", []):
        assert bias > 1000
        drawn = server.tokenizer(text, add_special_tokens=False)["input_ids"]
    if "\N{REPLACEMENT CHARACTER}" in server.tokenizer.decode(drawn):
        # The server waits for the rest of the character.
        return 200, {"content": ""}
    return 200, {"content": "x", "completion_probabilities": [{**listed[0], "top_logprobs": listed}]}


def _llama_tokenize(server: ModelServer, content: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"tokens": server.tokenizer(content["content"])["input_ids"]}


def _llama_template(server: ModelServer, content: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"prompt": server.rendered(content)}


_VLLM = {"/v1/completions": _vllm_completion, "/tokenize": _vllm_tokenize}
_LLAMA = {
    "/completion": _llama_completion,
    "/tokenize": _llama_tokenize,
    "/apply-template": _llama_template,
}


@contextmanager
def started(server: ModelServer) -> Iterator[ModelServer]:
    """Serve on a free port of this machine, and set the server's address."""

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, content: dict[str, Any]) -> None:
            if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
                self._send(401, {"error": "Unauthorized"})
                return
            self._send(*server.answer(self.path, content))

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        server.address = f"http://127.0.0.1:{listening.server_port}"
        yield server
        listening.shutdown()
