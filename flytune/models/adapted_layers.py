"""Layers that `all-linear` adapts, and those that it leaves without an adapter."""

import re
from typing import Any

from flytune.models import expert_layers
from flytune.recipe import Method
from training_estimates.meta_model import decoder_of

_FIXED = (
    r"(?:.*\.)?(?:[^.]*router[^.]*|gate|indexer|encoder_attn|cross_attn|crossattention)\..*|"
    r"(?:.*\.)?(?:[^.]*router|gate|shared_expert_gate|dt_proj)"
)
"""Routers (in code of a model's own, a linear layer `gate`) and gates of shared experts choose experts: an
adapter on them changes which experts a sample trains. Indexers of sparse attention choose tokens, without a
gradient, and no text reaches the attention to an encoder or to images. Mamba layers read dt_proj's weight and
not its result (modeling_mamba, modeling_jamba): an adapter there changes nothing."""
MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Model types whose out_proj PEFT refuses (peft 0.21, tuners_utils._check_lora_target_modules_mamba): their
kernels read its weight, not its result."""

_LINEAR_NAMES, _MIXTRAL_NAMES = (
    frozenset({"gate", "gate_proj", "up_proj", "down_proj"}),
    frozenset({"gate", "w1", "w2", "w3"}),
)
FUSED_EXPERTS = {
    **dict.fromkeys(
        (
            "afmoe",
            "beam",
            "cohere2_moe",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots1",
            "ernie4_5_moe",
            "exaone_moe",
            "flex_olmo",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "hunyuan_v1_moe",
            "longcat_flash",
            "mellum",
            "olmoe",
            "qwen3_moe",
            "qwen3_next",
            "solar_open",
        ),
        _LINEAR_NAMES,
    ),
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), _MIXTRAL_NAMES),
}
"""Names of layers, by model type, in whose place PEFT would adapt the tensor of all experts and the router.

For model types whose experts transformers 5 keeps in one tensor, PEFT 0.21 (transformers_weight_conversion)
reads `all-linear` as it was in transformers 4: it adapts that tensor and the router, in place of all layers
of those names, and fails with a lora_dropout. Here such names have no adapter, unless method.target_modules
names them.
"""


def is_left_out(model_type: str, decoder: str | None, module: str) -> bool:
    """Return whether `all-linear` leaves a linear layer without an adapter, by its name in the model.

    Args:
        decoder: name of the text decoder in a model of several parts (decoder_of); None if there is one part.
    """
    leaf = module.rpartition(".")[2]
    if decoder and not module.startswith(f"{decoder}."):
        return True
    if re.fullmatch(_FIXED, module) or leaf in FUSED_EXPERTS.get(model_type, ()):
        return True
    return leaf == "out_proj" and model_type in MAMBA


def fields(model: Any, method: Method) -> dict[str, Any]:
    """Return the fields of PEFT's LoraConfig that name what an adapter changes: target_modules,
    target_parameters ..."""
    if method.is_all_linear:
        found = _all_linear(model)
    else:
        named = method.target_modules
        if isinstance(named, str) and _type_of(model) in FUSED_EXPERTS:
            # PEFT would take the last parts of the names that match, and adapt them in all layers.
            named = [name for name in _linear_layers(model) if re.fullmatch(named, name)]
        found = {"target_modules": named if isinstance(named, str) else list(named)}
    if not method.experts:
        return found
    targets = found["target_modules"]
    if not method.is_all_linear and (
        listed := [name for name in _linear_layers(model) if expert_layers.is_listed(name)]
    ):
        ends = "|".join(map(re.escape, listed))
        found["target_modules"] = (
            f"(?:{targets})|(?:{ends})" if isinstance(targets, str) else [*targets, *listed]
        )
    return found | {"target_parameters": expert_layers.suffixes(expert_layers.fused(model)) or None}


def _all_linear(model: Any) -> dict[str, Any]:
    names = FUSED_EXPERTS.get(_type_of(model), frozenset())
    linear = _linear_layers(model)
    if names:
        leaves = {name.rpartition(".")[2] for name in linear if not re.fullmatch(_FIXED, name)}
        return {"target_modules": sorted(leaves - names), "exclude_modules": excluded(model)}
    return {"target_modules": "all-linear", "exclude_modules": excluded(model)}


def excluded(model: Any) -> str | None:
    """Return the regular expression for PEFT's exclude_modules with `all-linear`; None if no linear layer
    matches it.

    Left out are routers, the indexers of sparse attention, Mamba's out_proj where PEFT refuses it, and in a
    model of text and images or sound all that is not of its text decoder: samples of text alone give those
    layers no gradient.
    """
    parts = [_FIXED]
    if _type_of(model) in MAMBA:
        parts.append(r"(?:.*\.)?out_proj")
    if decoder := decoder_of(model):
        parts.append(rf"(?!{re.escape(decoder)}\.).*")
    pattern = re.compile("|".join(parts))
    names = FUSED_EXPERTS.get(_type_of(model), frozenset())
    # PEFT refuses a pattern that leaves out none of the layers that it would adapt.
    adapted = [name for name in _linear_layers(model) if name.rpartition(".")[2] not in names]
    return pattern.pattern if any(pattern.fullmatch(name) for name in adapted) else None


def _linear_layers(model: Any) -> list[str]:
    """Return the names of the layers that PEFT takes for linear, without the head."""
    import torch
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings() or getattr(model, "score", None)
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear | Conv1D) and layer is not head
    ]


def _type_of(model: Any) -> str:
    return str(getattr(model.config, "model_type", None))
