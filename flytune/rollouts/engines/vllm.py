"""The API of vLLM's server, as far as drawing answers and handing weights over asks it (vLLM 0.32)."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from flytune.errors import ServingError, TrainingError
from flytune.rollouts.sampling import Completion, Drawing
from flytune.sentences import counted
from flytune.servers import Client, Form, Refusal

_AT_ONCE = 128
"""Answers that a process asks for at a time; vLLM batches them itself."""
_SEED_BITS = 63


class WantedAnswer(NamedTuple):
    """An answer that is to be drawn."""

    prompt: Sequence[int]
    """Tokens of the prompt."""
    key: int
    """Number of 128 bits from which its random numbers follow."""
    most: int
    """Most tokens of the answer."""


class _Model(Form):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _ModelList(Form):
    data: list[_Model]


class _Logprobs(Form):
    token_logprobs: list[Annotated[float, Field(le=0.1)] | None]


class _Choice(Form):
    token_ids: list[Annotated[int, Field(ge=0)]]
    logprobs: _Logprobs
    finish_reason: str | None


class _Answer(Form):
    model: str
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


class _Version(Form):
    weight_version: str


class _TokenIds(Form):
    tokens: list[int]


class VllmServer:
    """A server of vLLM whose weights this run replaces."""

    largest: ClassVar[int] = 64 * 2**20
    """Bytes of an answer that its client should read: some 250 for each drawn token."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def is_ready(self) -> bool:
        """Return whether it answers."""
        try:
            return self.client.order("/health") is None
        except ServingError:
            return False

    def base(self) -> tuple[str, int]:
        """Return the name of its base model, and the most tokens of prompt and answer together."""
        for model in self._asked("/v1/models", None, _ModelList).data:
            if model.parent is None and model.max_model_len is not None:
                return model.id, model.max_model_len
        raise self.client.error("/v1/models", "lists no base model; name a server of vLLM")

    def tokens(self, text: str) -> list[int]:
        """Return its tokens of a text, without those that begin and end one."""
        asked = {"prompt": text, "add_special_tokens": False}
        return self._asked("/tokenize", asked, _TokenIds).tokens

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load the adapter in a folder under a name of its own."""
        self._ordered("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        self._ordered("/v1/unload_lora_adapter", {"lora_name": name})

    def load_weights(self, folder: Path) -> None:
        """Replace all weights by those of a complete model of the same configuration, and forget what was
        computed with the old ones."""
        self._ordered(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        )
        self._ordered("/reset_prefix_cache", {})

    def name_weights(self, version: str) -> None:
        """Name the weights, so that a server that was started anew, or that another run uses, is known."""
        self._ordered("/update_weight_version", {"new_version": version})

    def weights(self) -> str:
        """Return the name of its weights."""
        return self._asked("/weight_info", None, _Version).weight_version

    def sleep(self) -> None:
        """Give the GPU's memory back, and keep the weights in host memory."""
        self._ordered("/sleep?level=1", {})

    def wake(self) -> None:
        """Take the GPU's memory again."""
        self._ordered("/wake_up", {})

    def draw(self, model: str, wanted: Sequence[WantedAnswer], drawing: Drawing) -> list[Completion]:
        """Return an answer of a model to each prompt, each drawn with a seed of its own.

        Raises:
            ServingError: the server cannot be reached, or does not do it.
            TrainingError: an answer is not what was asked for.
        """
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="drawing") as threads:
            return list(threads.map(lambda prompt: self._drawn(model, prompt, drawing), wanted))

    def _drawn(self, model: str, wanted: WantedAnswer, drawing: Drawing) -> Completion:
        path = "/v1/completions"
        # All that a generation_config.json beside the weights could set otherwise.
        asked = {
            "model": model,
            "prompt": list(wanted.prompt),
            "max_tokens": wanted.most,
            "seed": wanted.key >> 128 - _SEED_BITS,
            "temperature": drawing.temperature,
            "top_p": drawing.top_p,
            "top_k": drawing.top_k,
            "min_p": drawing.min_p or 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # The model's own end is one of them.
            "ignore_eos": True,
            "stop_token_ids": list(drawing.ends),
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = self._asked(path, asked, _Answer)
        choice = answer.choices[0]
        tokens, log_probs = choice.token_ids, choice.logprobs.token_logprobs
        is_cut = choice.finish_reason == "length"
        if answer.model != model:
            problem = f"of model {answer.model!r:.80}, not of {model}"
        elif choice.finish_reason not in ("stop", "length"):
            problem = f"which ended by {choice.finish_reason!r:.80}, not by a token or its length"
        elif not 0 < len(tokens) <= wanted.most or len(log_probs) != len(tokens):
            count = counted(len(tokens), "token")
            problem = f"of {count}, {len(log_probs)} with log-probabilities, not 1 to {wanted.most}"
        elif not is_cut and tokens[-1] not in drawing.ends:
            problem = f"which ended with token {tokens[-1]}, which is none of the ends {list(drawing.ends)}"
        elif not all(value is not None and math.isfinite(value) for value in log_probs):
            problem = "with a log-probability that is none"
        else:
            return Completion(tokens, [float(value or 0.0) for value in log_probs], is_cut)
        raise TrainingError(
            f"{self.client.address}{path}: vLLM returned an answer {problem}; nothing of this step is trained"
        )

    def _asked(self, path: str, content: dict[str, Any] | None, kind: Any) -> Any:
        answer = self.client.get(path, kind) if content is None else self.client.post(path, content, kind)
        if isinstance(answer, Refusal):
            raise self._refused(path, answer)
        return answer

    def _ordered(self, path: str, content: dict[str, Any]) -> None:
        if refusal := self.client.order(path, content):
            raise self._refused(path, refusal)

    def _refused(self, path: str, refusal: Refusal) -> Exception:
        if not refusal.is_missing or path.startswith("/v1/"):
            return self.client.refused(path, refusal)
        return self.client.error(
            path,
            "the server does not have it; start vLLM with VLLM_SERVER_DEV_MODE=1, "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora",
        )
