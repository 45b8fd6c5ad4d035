"""The engine that draws answers, a section of objective grpo: transformers in the trainer itself, or vLLM."""

import urllib.parse
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flytune import addresses, limits
from flytune.recipe.sections import Section
from flytune.schema import PathOrAddress

ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
LARGEST_RANK = 512
"""Largest rank of an adapter that vLLM loads (0.32.0, vllm/config/lora.py: MaxLoRARanks)."""


class TransformersEngine(Section):
    """The trained model itself, called by transformers: it draws the same answers whatever the layout."""

    name: Literal["transformers"] = "transformers"
    """`transformers` draws with the trained model itself; `vllm` with a server beside it
    (docs/objectives.md)."""
    draws_as_trained: ClassVar[bool] = True
    """True if it computes what is trained, so that importance weights are 1."""
    own_places: ClassVar[tuple[str, ...]] = ()
    """Fields with a program, a server or a folder, as `field: value`."""


class VllmEngine(Section):
    """A server of vLLM, which gets the weights of each step before it draws."""

    name: Literal["vllm"]
    python: Annotated[str, Field(pattern=r"^/[^\x00-\x1f]+$", max_length=limits.PATH)] = (
        "/opt/vllm/bin/python"
    )
    """Interpreter of the environment with vLLM, which each process with a GPU starts, and on CPUs the first
    process of each node; the train image has it with the build argument VLLM."""
    gpus: Annotated[int, Field(ge=0, le=limits.SHARDS)] = 0
    """GPUs of each node that draw and do not train, each with a server of its own; 0: each GPU that trains
    has a server, which sleeps while it trains."""
    address: Annotated[str, Field(min_length=1, max_length=limits.PATH)] | None = None
    """Address of a server that is there already, instead of one that the run starts: https://HOST, or
    http://127.0.0.1:PORT in the pod; its key is in FLYTUNE_API_KEY."""
    folder: PathOrAddress | None = None
    """Folder for the weights that are handed over, which trainer and server see at this path; by default
    /dev/shm, or the temporary folder where that is too small."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the GPU's memory that the server takes (vLLM's option of that name); by default 0.4, and 0.9
    of GPUs that do not train."""
    timeout_minutes: Annotated[float, Field(ge=limits.LEAST_MINUTES, le=limits.MINUTES)] = 10.0
    """Longest time in which the server starts, loads weights, or draws an answer."""
    vllm_importance_sampling_mode: ImportanceMode = "sequence_mask"
    """Treatment of importance weights outside of their bounds, of each token or of a whole answer: set to the
    bound (truncate), or to 0 (mask)."""
    vllm_importance_sampling_clip_max: Annotated[float, Field(ge=1, le=limits.FACTOR)] = 3.0
    """Largest importance weight."""
    vllm_importance_sampling_clip_min: Annotated[float, Field(ge=0, le=1)] | None = None
    """Smallest importance weight; none by default."""

    draws_as_trained: ClassVar[bool] = False
    """True if it computes what is trained, so that importance weights are 1."""
    cpu_cache_gib: ClassVar[int] = 1
    """GiB of keys and values of a server on a CPU, where the variable VLLM_CPU_KVCACHE_SPACE says nothing:
    vLLM would take nine tenths of the memory."""
    own_process: ClassVar[tuple[str, ...]] = ("python", "gpus", "gpu_memory_utilization")
    """Fields of a server that the run starts."""

    @field_validator("address")
    @classmethod
    def _is_a_server(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if reason := addresses.problem(value, is_address=True):
            raise ValueError(f"{addresses.refusal(reason)}; the server's key is read from FLYTUNE_API_KEY")
        parts = _split(value)
        if parts is None or parts.query or parts.fragment or any(mark in value for mark in " \t\r\n"):
            raise ValueError(
                f"{value!r:.200}: no address of a server; write https://HOST or http://127.0.0.1:PORT"
            )
        if parts.scheme == "http" and not addresses.is_here(parts.hostname or ""):
            raise ValueError(
                f"{value:.200}: prompts, answers and the key would be readable on the way; write https://, "
                "or http://127.0.0.1:PORT for a server in the pod"
            )
        return value

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        changed = self.changed(*self.own_process)
        if self.address is not None and changed:
            raise ValueError(
                f"{changed[0]}: of a server that the run starts, and address names another; remove one"
            )
        if self.folder is not None and "://" in self.folder:
            raise ValueError(
                f"folder: {self.folder:.200}: vLLM reads weights from a file system; name a folder"
            )
        if self.address is not None and not self.is_beside and self.folder is None:
            raise ValueError(
                "folder: a server outside of the pod reads the weights from a folder that both see; name it"
            )
        return self

    @property
    def shares_gpus(self) -> bool:
        """True if the run starts a server on a GPU that trains."""
        return self.address is None and not self.gpus

    @property
    def memory_share(self) -> float:
        """Share of a GPU's memory that a server of the run takes."""
        return self.gpu_memory_utilization or (0.9 if self.gpus else 0.4)

    @property
    def own_places(self) -> tuple[str, ...]:
        """Fields with a program, a server or a folder that is not the default, as `field: value`."""
        return tuple(f"{name}: {getattr(self, name)}" for name in self.changed("python", "address", "folder"))

    @property
    def is_beside(self) -> bool:
        """True if the server is in the pod of the trainer."""
        parts = _split(self.address) if self.address else None
        return parts is None or addresses.is_here(parts.hostname or "")

    def refusals(self, recipe: Any) -> list[str]:
        method, section, where = recipe.method, recipe.objective, "objective.engine: vllm"
        refused = []
        if method.name == "qlora":
            refused.append(
                f"{where} with method qlora: the server has the base before it is quantized, whose "
                "answers are not the trained model's; use method lora, or engine: transformers"
            )
        if method.use_dora:
            refused.append(f"{where} with method.use_dora: vLLM loads no DoRA; remove one of them")
        if method.experts:
            refused.append(f"{where} with method.experts: not tested; remove one of them")
        patterns = [name for name in ("rank_pattern", "alpha_pattern") if getattr(method, name)]
        if patterns:
            refused.append(
                f"{where} with method.{patterns[0]}: vLLM has one scale for all layers of an adapter, and "
                "would draw with other weights than the trained ones; remove it, or use engine: transformers"
            )
        if method.name != "full" and method.largest_rank > LARGEST_RANK:
            refused.append(
                f"{where} with rank {method.largest_rank}: vLLM loads adapters of up to {LARGEST_RANK}; "
                "lower method.r"
            )
        is_cut = section.top_p < 1 or section.top_k or section.min_p
        if is_cut and section.temperature != 1:
            refused.append(
                f"{where} with objective.temperature: {section.temperature:g} beside top_p, top_k or min_p: "
                "vLLM has the log-probabilities of all tokens at temperature 1 alone, which importance "
                "weights need; leave out one of them"
            )
        return refused

    def cut(self, weights: Any) -> tuple[Any, Any]:
        """Return importance weights within the bounds, and which of them were outside of them: tensors of the
        same shape."""
        low, high = self.vllm_importance_sampling_clip_min or 0.0, self.vllm_importance_sampling_clip_max
        outside = (weights < low) | (weights > high)
        if self.vllm_importance_sampling_mode.endswith("mask"):
            return weights.masked_fill(outside, 0.0), outside
        return weights.clamp(low, high), outside

    @property
    def weighs_answers(self) -> bool:
        """True if an answer has one importance weight, not one for each token."""
        return self.vllm_importance_sampling_mode.startswith("sequence")


def _split(address: str) -> urllib.parse.SplitResult | None:
    try:
        parts = urllib.parse.urlsplit(address)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if is_whole else None


def _with_name(value: Any) -> Any:
    """Return `engine: vllm` as {name: vllm}."""
    if isinstance(value, dict) and "name" not in value:
        raise ValueError("name the engine: vllm or transformers")
    return {"name": value} if isinstance(value, str) else value


Engine = Annotated[
    Annotated[TransformersEngine | VllmEngine, Field(discriminator="name")], BeforeValidator(_with_name)
]
