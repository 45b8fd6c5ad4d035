"""Cases: how a server is started with an artifact, and what `flytune verify` must say of it, as it was
trained and with each fault."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.served.models import Models

_BASE = "it answers as the base does"
_SCALED = "it answers as the adapter does at some 0.5 of its scale"
_TEMPLATE = "it makes another prompt of a chat: another chat template"
_TOKENIZER = "it makes other tokens of texts: another tokenizer"
_FURTHER = "it is further from the trained model than the bound"
_ROUNDED = "it is near to the trained model, but not equal: a quantized build"


@dataclass(frozen=True)
class Question:
    """A call of `flytune verify`, and its verdict."""

    model: str | None = None
    """Name of the model at the server."""
    bound: float | None = None
    problem: str = ""
    """Beginning of what must be said; empty for yes."""


@dataclass(frozen=True)
class Case:
    """A server with an artifact."""

    name: str
    artifact: str
    """Name of its run."""
    server: str
    """`vllm` or `llama`."""
    words: Callable[[Models], Sequence[str | Path]]
    """Function that returns the server's arguments."""
    asked: tuple[Question, ...] = (Question(),)


def _adapters(name: str, *words: str) -> Callable[[Models], Sequence[str | Path]]:
    """Return the arguments for the adapter of a run on its base, and for the same at half its scale."""

    def arguments(models: Models) -> list[str | Path]:
        modules = [f"{name}={models.artifact(name)}", f"halved={models.halved(name)}"]
        options = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules, *words]
        return ["--model", models.base_of(name), *options]

    return arguments


def _on_base(models: Models, *words: str | Path) -> list[str | Path]:
    return ["-m", models.gguf(models.base, "f32"), *words]


def _as_gguf(name: str, outtype: str = "f32") -> Callable[[Models], Sequence[str | Path]]:
    """Return the arguments for the artifact of a run as GGUF."""
    return lambda models: ["-m", models.gguf(models.artifact(name), outtype)]


_Q8 = 0.02
"""Bound of q8_0 in nats per token."""

CASES = [
    Case(
        "vllm-full",
        "full",
        "vllm",
        lambda models: ["--model", models.artifact("full"), "--served-model-name", "full"],
    ),
    Case(
        "vllm-lora",
        "lora",
        "vllm",
        _adapters("lora"),
        (Question(), Question("halved", problem=_SCALED), Question("BASE", problem=_BASE)),
    ),
    Case(
        "vllm-bfloat16",
        "bfloat16",
        "vllm",
        _adapters("bfloat16", "--dtype", "bfloat16"),
        (Question(), Question("halved", problem=_SCALED), Question("BASE", problem=_BASE)),
    ),
    Case("vllm-merged", "lora", "vllm", lambda models: ["--model", models.merged("lora")]),
    Case(
        "vllm-merged-qlora",
        "qlora",
        "vllm",
        lambda models: ["--model", models.merged("qlora")],
        (Question(bound=0.01),),
    ),
    Case("vllm-tokens", "tokens", "vllm", lambda models: ["--model", models.merged("tokens")]),
    # Adapters of experts are left out: vLLM 0.32.0 computes them with Triton, which a CPU has not.
    Case("vllm-merged-experts", "experts", "vllm", lambda models: ["--model", models.merged("experts")]),
    Case(
        "vllm-template",
        "full",
        "vllm",
        lambda models: ["--model", models.artifact("full"), "--chat-template", models.other_template],
        (Question(problem=_TEMPLATE),),
    ),
    Case(
        "vllm-tokenizer",
        "full",
        "vllm",
        lambda models: [
            "--model",
            models.artifact("full"),
            "--tokenizer",
            models.with_other_tokenizer(models.artifact("full")),
        ],
        (Question(problem=_TOKENIZER),),
    ),
    Case("llama-full", "full", "llama", _as_gguf("full")),
    Case(
        "llama-smollm2",
        "smollm2",
        "llama",
        # By itself the server computes attention in 16 bits, which is 0.012 nats here.
        lambda models: [*_as_gguf("smollm2")(models), "-fa", "off", "-ctk", "f32", "-ctv", "f32"],
    ),
    Case(
        "llama-q8",
        "smollm2",
        "llama",
        _as_gguf("smollm2", "q8_0"),
        (Question(bound=_Q8), Question(problem=_ROUNDED)),
    ),
    Case(
        "llama-q4",
        "smollm2",
        "llama",
        lambda models: ["-m", models.quantized(models.artifact("smollm2"), "Q4_0")],
        (Question(bound=_Q8, problem=_FURTHER),),
    ),
    Case("llama-merged", "lora", "llama", _as_gguf("lora")),
    Case("llama-lora", "lora", "llama", lambda models: _on_base(models, "--lora", models.lora_gguf("lora"))),
    Case(
        "llama-own-template",
        "template",
        "llama",
        lambda models: _on_base(
            models,
            *("--lora", models.lora_gguf("template")),
            *("--chat-template-file", models.artifact("template") / "chat_template.jinja"),
        ),
    ),
    Case(
        "llama-bases-template",
        "template",
        "llama",
        lambda models: _on_base(models, "--lora", models.lora_gguf("template")),
        (Question(problem=_TEMPLATE),),
    ),
    Case("llama-base", "lora", "llama", _on_base, (Question(problem=_BASE),)),
    Case(
        "llama-halved",
        "lora",
        "llama",
        lambda models: _on_base(models, "--lora-scaled", f"{models.lora_gguf('lora')}:0.5"),
        (Question(problem=_SCALED),),
    ),
    Case("llama-tokens", "tokens", "llama", _as_gguf("tokens")),
    Case("llama-experts", "experts", "llama", _as_gguf("experts")),
    Case(
        "llama-merged-qlora",
        "qlora",
        "llama",
        _as_gguf("qlora"),
        (Question(bound=0.01),),
    ),
    Case(
        "llama-template",
        "full",
        "llama",
        lambda models: [
            *("-m", models.gguf(models.artifact("full"), "f32")),
            *("--chat-template-file", models.other_template),
        ],
        (Question(problem=_TEMPLATE),),
    ),
    Case(
        "llama-tokenizer",
        "full",
        "llama",
        lambda models: ["-m", models.gguf(models.with_other_tokenizer(models.artifact("full")), "f32")],
        (Question(problem=_TOKENIZER),),
    ),
]
