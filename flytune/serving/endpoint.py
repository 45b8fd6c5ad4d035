"""Endpoints with OpenAI's API, of vLLM and of llama.cpp's server, as far as a verification asks them.

Prompts are asked one by one, and for the likeliest next tokens alone: vLLM's worker ends when it computes
`prompt_logprobs` of an adapter for several requests at once, those of other clients included.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from flytune.servers import Client, Form, Refusal

LISTED = 20
"""Next tokens that a server lists for a prompt: vLLM's --max-logprobs without a setting."""
_FEWER = 5
"""Next tokens that are asked of a server that refuses LISTED: the most of OpenAI's own API."""
_ID = r"token_id:\d{1,9}"
_SAMPLING = {"max_tokens": 1, "temperature": 0.0}
_DRAWN = [["a", 10_000.0]]
"""logit_bias by which llama.cpp's server draws the token of a letter; what it lists does not follow from it.
After a token that is part of a character it would list nothing."""
_Messages = Sequence[Mapping[str, str]]
_LogProbability = Annotated[float, Field(le=0.1)]


class _Served(Form):
    id: str
    owned_by: str = ""


class _Models(Form):
    data: list[_Served]


class _OpenAiLogprobs(Form):
    top_logprobs: Annotated[
        list[Annotated[dict[str, _LogProbability], Field(min_length=1)]], Field(min_length=1)
    ]


class _OpenAiChoice(Form):
    logprobs: _OpenAiLogprobs


class _Completion(Form):
    choices: Annotated[list[_OpenAiChoice], Field(min_length=1)]


class _Token(Form):
    id: Annotated[int, Field(ge=0, lt=10**9)]
    logprob: _LogProbability


class _Position(Form):
    top_logprobs: Annotated[list[_Token], Field(min_length=1)]


class _LlamaCompletion(Form):
    completion_probabilities: Annotated[list[_Position], Field(min_length=1)]


class _Tokens(Form):
    tokens: list[int]


class _Rendered(Form):
    prompt: str


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
        """Return the tokens of the prompt that the server makes of a chat, or its refusal; None if it has no
        route that says them."""


class VllmEndpoint(Endpoint):
    """Server of vLLM, or another one with its additions to OpenAI's API."""

    server = "vllm"
    _listed = LISTED

    def next_tokens(self, prompt: Sequence[int]) -> dict[int, float]:
        """Return them by /v1/completions, which takes token ids."""
        asked = {"model": self.model, "prompt": list(prompt), "return_tokens_as_token_ids": True, **_SAMPLING}
        answer = self.client.post("/v1/completions", asked | {"logprobs": self._listed}, _Completion)
        if isinstance(answer, Refusal):
            if answer.status == 400 and self._listed > _FEWER:
                self._listed = _FEWER
                return self.next_tokens(prompt)
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
            return None if answer.is_missing else answer
        return answer.tokens


class LlamaCppEndpoint(Endpoint):
    """Server of llama.cpp."""

    server = "llama.cpp"

    def next_tokens(self, prompt: Sequence[int]) -> dict[int, float]:
        """Return them by /completion, whose lists have ids."""
        asked = {"model": self.model, "prompt": list(prompt), "n_predict": 1, "n_probs": LISTED}
        # A prompt that begins as the last one did would be computed in other batches than alone.
        asked |= {"temperature": 0.0, "cache_prompt": False, "logit_bias": _DRAWN}
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
            return None if answer.is_missing else answer
        return self._tokens(answer.prompt, is_prompt=True)

    def _tokens(self, text: str, is_prompt: bool) -> list[int] | None:
        asked = {"model": self.model, "content": text, "add_special": is_prompt, "parse_special": True}
        answer = self.client.post("/tokenize", asked, _Tokens)
        return None if isinstance(answer, Refusal) else answer.tokens


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
    if model is None and likely in served:
        model = likely
    elif model is None and len(served) > 1:
        raise client.error("/v1/models", f"has several models; name one by --model: {_named(served)}")
    elif model is None:
        model = next(iter(served))
    elif model not in served:
        raise client.error("/v1/models", f"has no model {model!r:.200}, but {_named(served)}")
    is_llama = served[model].owned_by == "llamacpp"
    return LlamaCppEndpoint(client, model) if is_llama else VllmEndpoint(client, model)


def _named(names: Mapping[str, object]) -> str:
    return ", ".join(repr(name)[:200] for name in list(names)[:8])
