"""Endpoints with OpenAI's API, of vLLM and of llama.cpp's server, as far as a verification asks them.

Prompts are asked one by one, and for the likeliest next tokens alone: vLLM's worker ends when it computes
`prompt_logprobs` of an adapter for several requests at once, those of other clients included.
"""

import json
import os
import re
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flytune import addresses, json_core
from flytune.artifacts.exchange import HttpAnswer, answer_to
from flytune.errors import ServingError
from flytune.files import FileRefusedError

KEY = "FLYTUNE_API_KEY"
"""Environment variable with the server's key."""
SECONDS = 120.0
"""Limit of one exchange."""
LARGEST = 4 * 2**20
"""Bytes of an answer that are read."""
LISTED = 20
"""Next tokens that a server lists for a prompt: vLLM's --max-logprobs without a setting."""
_FEWER = 5
"""Next tokens that are asked of a server that refuses LISTED: the most of OpenAI's own API."""
_ID = r"token_id:\d{1,9}"
_SHOWN = 300
_SAMPLING = {"max_tokens": 1, "temperature": 0.0}
_Messages = Sequence[Mapping[str, str]]
_LogProbability = Annotated[float, Field(le=0.1)]


class _Form(BaseModel):
    """Part of an answer that is read; the rest of it is not."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Served(_Form):
    id: str
    owned_by: str = ""


class _Models(_Form):
    data: list[_Served]


class _OpenAiLogprobs(_Form):
    top_logprobs: Annotated[
        list[Annotated[dict[str, _LogProbability], Field(min_length=1)]], Field(min_length=1)
    ]


class _OpenAiChoice(_Form):
    logprobs: _OpenAiLogprobs


class _Completion(_Form):
    choices: Annotated[list[_OpenAiChoice], Field(min_length=1)]


class _Token(_Form):
    id: Annotated[int, Field(ge=0, lt=10**9)]
    logprob: _LogProbability


class _Position(_Form):
    top_logprobs: Annotated[list[_Token], Field(min_length=1)]


class _LlamaCompletion(_Form):
    completion_probabilities: Annotated[list[_Position], Field(min_length=1)]


class _Tokens(_Form):
    tokens: list[int]


class _Rendered(_Form):
    prompt: str


_Kind = TypeVar("_Kind", bound=_Form)


class Refusal(NamedTuple):
    """Answer of a server that does not do what it was asked."""

    status: int
    text: str
    """Message of the answer in one line."""


class Endpoint(ABC):
    """Server at an address, with one of its models."""

    server: Literal["vllm", "llama.cpp"]

    def __init__(self, client: "Client", model: str) -> None:
        self.client, self.model = client, model

    @abstractmethod
    def next_tokens(self, prompt: Sequence[int]) -> dict[int, float]:
        """Return the log-probabilities of the likeliest tokens after a prompt of token ids, in nats.

        Raises:
            ServingError: the server does not say.
        """

    @abstractmethod
    def tokens(self, text: str) -> list[int] | None:
        """Return the server's tokens of a text, without those that begin and end one; None if it does not
        say."""

    @abstractmethod
    def chat_tokens(self, messages: _Messages) -> list[int] | Refusal | None:
        """Return the tokens of the prompt that the server makes of a chat, or its refusal; None if it does
        not say."""


class VllmEndpoint(Endpoint):
    """Server of vLLM, or another one with its additions to OpenAI's API."""

    server = "vllm"
    _listed = LISTED

    def next_tokens(self, prompt: Sequence[int]) -> dict[int, float]:
        """Return them by /v1/completions, which takes token ids."""
        asked = {"model": self.model, "prompt": list(prompt), "return_tokens_as_token_ids": True, **_SAMPLING}
        answer = self.client.post("/v1/completions", asked | {"logprobs": self._listed}, _Completion)
        if isinstance(answer, Refusal) and answer.status == 400 and self._listed > _FEWER:
            self._listed = _FEWER
            return self.next_tokens(prompt)
        if isinstance(answer, Refusal):
            raise self.client.refused("/v1/completions", answer)
        listed = answer.choices[0].logprobs.top_logprobs[0]
        for name in listed:
            if not re.fullmatch(_ID, name):
                raise self.client.error(
                    "/v1/completions",
                    f"lists tokens by their texts ({name!r:.40}), not by their ids, as vLLM does",
                )
        return {int(name.rpartition(":")[2]): value for name, value in listed.items()}

    def tokens(self, text: str) -> list[int] | None:
        """Return them by /tokenize."""
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False}
        answer = self.client.post("/tokenize", asked, _Tokens)
        return None if isinstance(answer, Refusal) else answer.tokens

    def chat_tokens(self, messages: _Messages) -> list[int] | Refusal | None:
        """Return them by /tokenize."""
        asked = {"model": self.model, "messages": list(messages), "add_generation_prompt": True}
        answer = self.client.post("/tokenize", asked, _Tokens)
        if isinstance(answer, Refusal):
            return None if _is_missing(answer) else answer
        return answer.tokens


class LlamaCppEndpoint(Endpoint):
    """Server of llama.cpp."""

    server = "llama.cpp"

    def next_tokens(self, prompt: Sequence[int]) -> dict[int, float]:
        """Return them by /completion, whose lists have ids."""
        asked = {"model": self.model, "prompt": list(prompt), "n_predict": 1, "n_probs": LISTED}
        # A prompt that begins as the last one did would be computed in other batches than alone.
        asked |= {"temperature": 0.0, "cache_prompt": False}
        answer = self.client.post("/completion", asked, _LlamaCompletion)
        if isinstance(answer, Refusal):
            raise self.client.refused("/completion", answer)
        return {token.id: token.logprob for token in answer.completion_probabilities[0].top_logprobs}

    def tokens(self, text: str) -> list[int] | None:
        """Return them by /tokenize."""
        return self._tokens(text, is_prompt=False)

    def chat_tokens(self, messages: _Messages) -> list[int] | Refusal | None:
        """Return them by /apply-template and /tokenize, as the server does for a chat."""
        asked = {"model": self.model, "messages": list(messages)}
        answer = self.client.post("/apply-template", asked, _Rendered)
        if isinstance(answer, Refusal):
            return None if _is_missing(answer) else answer
        return self._tokens(answer.prompt, is_prompt=True)

    def _tokens(self, text: str, is_prompt: bool) -> list[int] | None:
        asked = {"model": self.model, "content": text, "add_special": is_prompt, "parse_special": True}
        answer = self.client.post("/tokenize", asked, _Tokens)
        return None if isinstance(answer, Refusal) else answer.tokens


class Client:
    """HTTP client of one server: a request at a time, no redirect, and limits of time and size."""

    def __init__(self, address: str) -> None:
        """Check the address and the key in KEY.

        Raises:
            ServingError: one of them cannot be used.
        """
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
        self._key = os.environ.get(KEY, "")
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

    def error(self, path: str, problem: str) -> ServingError:
        """Return an error of this server."""
        return ServingError(f"{self.address}{path}: {problem}")

    def refused(self, path: str, refusal: Refusal) -> ServingError:
        """Return the error of what the server refuses."""
        what = f"answered {refusal.status}{f': {refusal.text}' if refusal.text else ''}"
        if _is_missing(refusal):
            what += "; it is no server of vLLM or llama.cpp, or has another address"
        return self.error(path, what)

    def _read(self, path: str, content: bytes | None, kind: type[_Kind]) -> _Kind | Refusal:
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
        try:
            return kind.model_validate(json_core.load_object(body, LARGEST))
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
        try:
            request = urllib.request.Request(f"{self.address}{path}", content, headers)
            return answer_to(request, SECONDS, LARGEST)
        except FileRefusedError as error:
            raise self.error(path, f"answered {error}") from None
        except Exception as error:  # noqa: BLE001 (http.client's own, OSErrors, ValueErrors of an address)
            if _is_slow(error):
                raise self.error(path, f"no answer within {SECONDS:g} s; see the server's log") from None
            raise self.error(
                path,
                f"cannot be reached ({addresses.reason(error)}); start the server, or correct the address",
            ) from None


def connect(address: str, model: str | None = None, likely: str = "") -> Endpoint:
    """Return the endpoint of a server, by the list of its models.

    Args:
        address: http://HOST:PORT, with or without /v1.
        model: name of the model there; without one, the only model of the server, or `likely`.
        likely: name that is taken of several.

    Raises:
        ServingError: the server does not answer, has no such API, or not that model.
    """
    client = Client(address)
    answer = client.get("/v1/models", _Models)
    if isinstance(answer, Refusal):
        raise client.refused("/v1/models", answer)
    served = {entry.id: entry for entry in answer.data}
    if not served:
        raise client.error("/v1/models", "lists no model")
    if model is None:
        model = likely if likely in served else next(iter(served))
        if model != likely and len(served) > 1:
            raise client.error("/v1/models", f"has several models; name one by --model: {_named(served)}")
    if model not in served:
        raise client.error("/v1/models", f"has no model {model!r:.200}, but {_named(served)}")
    is_llama = served[model].owned_by == "llamacpp"
    return LlamaCppEndpoint(client, model) if is_llama else VllmEndpoint(client, model)


def _named(names: Mapping[str, object]) -> str:
    return ", ".join(repr(name)[:200] for name in list(names)[:8])


def _is_missing(refusal: Refusal) -> bool:
    """Return whether a server has nothing at a path, or not for this method."""
    return refusal.status in (404, 405, 501)


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
