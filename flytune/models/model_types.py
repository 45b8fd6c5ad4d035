"""Model types that Flytune trains and packs, by runs on a tiny instance of each (model_types.json)."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flytune import json_core
from training_estimates.config_json import shown
from training_estimates.meta_model import ENCODERS

FILE = Path(__file__).resolve().parent / "model_types.json"
"""Written by `python -m benchmarks.model_types --write`: the version of transformers, and a row for each of
its causal language models: packing (kinds of attention under which packed samples were as samples alone) and
problems (reasons by packing, full, lora, experts, bfloat16, slices: the parts of the weights that processes
read under fsdp). experts: true where there are routed experts, and adapters on them were tried. untried: true
if only packing was tried. attention: kinds that the type has. checkpointing: false where transformers has no
activation checkpointing of it.

Of TRL's chunked loss: chunked_loss is false where it is not the model's own loss with any configuration;
chunked_fields are those of CHUNKED_FIELDS that both read alike; own_fields, with their defaults, are fields
with another value of which only the model's own logits give its loss, and loss_fields those of which its
logits do not."""
VISION_TYPES = ("idefics3", "llava", "llava_onevision", "mistral3", "qwen2_5_vl", "qwen3_vl", "smolvlm")
"""Vision-language types, of which model_types.json has no rows: with images, tiny instances have the loss of
transformers, are trained, exported and read again (tests/end_to_end/test_vision_language.py)."""
_ENCODER_ROWS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "deberta-v2": {"attention": ["eager"]},
        "mpnet": {"attention": ["eager"], "checkpointing": False},
    }
)
"""Rows of encoders that are no causal language models and lack something; the others of ENCODERS lack
nothing."""
CHUNKED_FIELDS = (
    "final_logit_softcapping",
    "logit_scale",
    "output_multiplier",
    "lm_head_multiplier",
    "logits_scaling",
)
"""Fields of a configuration that TRL's chunked loss applies (trl 1.16, add_fused_lm_head), whether the model
does or not."""


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return the rows by model type."""
    return dict(json_core.load(FILE.read_bytes())["types"])


def packing_problem(model_type: str, attention: str, trust_remote_code: bool) -> str | None:
    """Return why data.packing would not keep the samples of such a model apart; None if a run showed that it
    does."""
    if trust_remote_code:
        return (
            "model.trust_remote_code: whether code of the model's own keeps packed samples apart is not known"
        )
    row = table().get(model_type)
    if row is None:
        return f"no test shows that packed samples of {model_type} do not see each other; leave packing out"
    if _kind_of_attention(attention) in row["packing"]:
        return None
    why = row["problems"].get("packing", f"{model_type} has no {attention} that a test could run")
    other = f"set model.attn_implementation to {row['packing'][0]}, or " if row["packing"] else ""
    return f"{model_type} with {attention}: {why}; {other}leave packing out"


def training_problem(
    model_type: str, method: str, in_slices: bool, trust_remote_code: bool, experts: bool = False
) -> str | None:
    """Return why a model type cannot be trained; None if a run showed that it can, or if the table does not
    know it.

    Args:
        method: full, lora or qlora; qlora adapts the layers that lora does.
        experts: True if routed experts get adapters.
        in_slices: True if each process reads its own part of the weights only (fsdp).
    """
    problems: dict[str, str] = _row(model_type, trust_remote_code).get("problems", {})
    problem = problems.get("full" if method == "full" else "lora")
    if problem is None and in_slices:
        problem = problems.get("slices")
    if problem is None and experts:
        problem = problems.get("experts")
    return problem


def attention_problem(model_type: str, attention: str, trust_remote_code: bool) -> str | None:
    """Return why transformers refuses to load a model type with a kind of attention; None if it has it, or is
    not known."""
    kinds = _row(model_type, trust_remote_code).get("attention")
    if kinds is None or _kind_of_attention(attention) in kinds:
        return None
    return f"{attention}: transformers has no such attention for {model_type}; set {' or '.join(kinds)}"


def checkpointing_problem(model_type: str, trust_remote_code: bool) -> str | None:
    """Return why activations of a model type cannot be recomputed; None if they can, or if the table does not
    know it."""
    if _row(model_type, trust_remote_code).get("checkpointing", True):
        return None
    return (
        f"transformers has no activation checkpointing for {model_type}; set "
        "training.activation_checkpointing: false"
    )


def dtype_problem(model_type: str, trust_remote_code: bool) -> str | None:
    """Return why a model type does not compute in 16 bits; None if it does, or if the table does not know
    it."""
    why = _row(model_type, trust_remote_code).get("problems", {}).get("bfloat16")
    return f"{model_type} does not compute in 16 bits ({why}); set float32" if why else None


def own_logits(config: Mapping[str, Any], trust_remote_code: bool) -> str | None:
    """Return why TRL's chunked loss is not the loss of a model with that configuration; None if it is.

    Args:
        config: the content of config.json, or transformers' configuration as a dictionary.
        trust_remote_code: whether code of the model's own is run, where the configuration names some.
    """
    kind = config.get("model_type")
    if trust_remote_code and "auto_map" in config:
        return "code of the model's own, whose head no test has run"
    row = {} if kind in VISION_TYPES else table().get(str(kind))
    if row is None:
        return f"model type {shown(kind)}, whose head no test has run"
    if not row.get("chunked_loss", True):
        return f"the head of {kind}"
    alike, own_fields = row.get("chunked_fields", ()), row.get("own_fields", {})
    for name, value in _fields(config):
        if name in alike:
            # TRL and the models differ on a cap or a factor that is not a positive number.
            if value is not None and not _is_positive(value):
                return f"{name}: {shown(value)}"
        elif (name in CHUNKED_FIELDS or name in own_fields) and value != own_fields.get(name):
            return f"{name}: {shown(value)}"
    return None


def loss_problem(config: Mapping[str, Any], trust_remote_code: bool) -> str | None:
    """Return which field of a configuration gives the model's own loss a term that Flytune's has not; None if
    none does."""
    kind = str(config.get("model_type"))
    fields = _row(kind, trust_remote_code and "auto_map" in config).get("loss_fields", {})
    for name, value in _fields(config):
        if name in fields and value != fields[name]:
            return (
                f"its config.json has {name}: {shown(value)}, with which the loss of a {kind} has a term "
                f"that is not trained here; write {json.dumps(fields[name])} in a copy of the model"
            )
    return None


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a configuration and of its parts."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _fields(value)
        else:
            yield name, value


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _kind_of_attention(attention: str) -> str:
    """Return the kind that rows list for an attn_implementation; FlashAttention 3 is handed the same
    arguments as 2."""
    return "flash_attention_2" if attention.startswith("flash_attention") else attention


def _row(model_type: str, trust_remote_code: bool) -> dict[str, Any]:
    """Return the row of a model type; empty if there is none, or if the model runs code of its own."""
    return {} if trust_remote_code else _ENCODER_ROWS.get(model_type) or table().get(model_type, {})


def was_trained(model_type: str) -> bool:
    """Return whether training a tiny instance of a model type was tried."""
    if model_type in VISION_TYPES or model_type in ENCODERS:
        return True
    return model_type in table() and not table()[model_type].get("untried")
