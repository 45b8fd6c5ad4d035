"""The scaling of a base's rotary embedding by a recipe (model.rope_scaling): types of models that read it,
and how it reaches a configuration."""

from typing import Any

from flytune.errors import RecipeError
from flytune.models import base, positions
from flytune.recipe import Model, Recipe

_READING = (
    "afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bitnet cohere cohere2 cohere2_moe cwm "
    "dbrx deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 "
    "exaone_moe falcon falcon_h1 flex_olmo flint gemma gemma2 glm glm4 glm4_moe glm4_moe_lite "
    "glm_moe_dsa gpt_neox gpt_neox_japanese gpt_oss granite granite_swa granitemoe granitemoe_swa "
    "granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 "
    "iquestcoder jais2 jetmoe kolibri1 lfm2 lfm2_moe llama llama4_text longcat_flash minicpm3 "
    "minimax_m2 minimax_m3_vl_text ministral mistral moshi nanochat nemotron olmo olmo2 olmo_hybrid "
    "olmoe persimmon phi qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next "
    "qwen4_exp_text seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu"
)
SCALED = frozenset(_READING.split())
"""Model types that read every type of scaling (transformers 5.23): a tiny model of each computes other logits
with it, and reads it again from its config.json (tests/models/test_rope.py)."""
SCALED_BY = {
    **dict.fromkeys(("minimax", "mixtral"), ("linear", "llama3")),
    **dict.fromkeys(("phi3", "phi4_multimodal"), ("longrope",)),
}
"""Model types that read some types of scaling, with those."""
_KEPT = ("rope_theta", "partial_rotary_factor")
"""Keys of rope_parameters that no scaling has."""
_ORIGINAL = "original_max_position_embeddings"
_PROBED = 48
"""Tokens beyond the base's positions of the gate's long prompt."""


def scaled(content: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return a config.json's content with the recipe's scaling instead of the base's own, if it has any.

    Raises:
        RecipeError: a model of this type does not read it, or it shortens what the model is made for.
    """
    scaling = model.rope_scaling
    if scaling is None:
        return content
    if problem := _problem(content, model, scaling.rope_type):
        raise RecipeError(f"model.rope_scaling: {problem}")
    unscaled = content | (content.get("rope_parameters") or {})
    kept = {key: unscaled[key] for key in _KEPT if key in unscaled}
    changed = {name: value for name, value in content.items() if name != "rope_scaling"}
    changed["rope_parameters"] = kept | scaling.parameters
    if scaling.positions is not None:
        before = positions.of(content, model.name_or_path)
        if before and scaling.rope_type != "llama3" and scaling.positions < before.tokens:
            raise RecipeError(
                f"model.rope_scaling: factor {scaling.factor:g} times original_max_position_embeddings makes "
                f"{scaling.positions:,} positions, less than the {before.tokens:,} that "
                f"{model.name_or_path} has; write a larger factor, or leave it out"
            )
        changed["max_position_embeddings"] = max(scaling.positions, before.tokens if before else 0)
        if _ORIGINAL in content:  # Phi-3's, which precedes the scaling's own
            changed["original_max_position_embeddings"] = scaling.parameters[
                "original_max_position_embeddings"
            ]
    return changed


def _problem(content: dict[str, Any], model: Model, rope_type: str) -> str | None:
    kind, name = str(content.get("model_type")), model.name_or_path
    if model.trust_remote_code:
        return (
            f"whether code of {name}'s own reads it is not known (model.trust_remote_code); write it into "
            "the config.json of a copy of the base"
        )
    if content.get("alibi") is True:
        return f"{name} has no rotary embedding (alibi in its config.json); leave it out"
    if kind in SCALED or rope_type in SCALED_BY.get(kind, ()):
        return None
    if kind in SCALED_BY:
        return f"transformers reads no {rope_type} for {kind}; write {' or '.join(SCALED_BY[kind])}"
    return (
        f"transformers reads none for {kind}, or one for each kind of its layers; leave it out (types that "
        "read it: docs/long-sequences.md)"
    )


def arguments(model: Model) -> dict[str, Any]:
    """Return the arguments of from_pretrained that scale the base's rotary embedding; empty without
    model.rope_scaling.

    Raises:
        RecipeError: as `scaled`; or its lists do not have a number for each frequency.
    """
    if model.rope_scaling is None:
        return {}
    config = base.configuration(model)
    before = config.to_dict()
    after = scaled(before, model)
    frequencies = _frequencies(config, after["rope_parameters"])
    numbers = len(getattr(model.rope_scaling, "long_factor", range(frequencies)))
    if numbers != frequencies:
        raise RecipeError(
            f"model.rope_scaling: long_factor and short_factor have {numbers} numbers; a head of "
            f"{model.name_or_path} has {frequencies} frequencies; write one for each"
        )
    return {key: value for key, value in after.items() if value != before.get(key)}


def put(config: Any, model: Model) -> None:
    """Scale the rotary embedding of the base's loaded configuration, in place."""
    for name, value in arguments(model).items():
        setattr(config, name, value)


def of_batch_alone(model: Any) -> Any:
    """Return a loaded model whose dynamic frequencies follow from each batch alone, in place.

    transformers keeps those of the longest sequence so far: results would depend on what the process has read
    before, so that neither a resumed run nor the gate would compute what the run did.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic" and hasattr(module, "original_inv_freq"):
            module.register_forward_pre_hook(_forget)
    return model


def _forget(module: Any, inputs: Any) -> None:
    module.max_seq_len_cached = module.original_max_seq_len
    module.register_buffer("inv_freq", module.original_inv_freq, persistent=False)


def tokens_beyond(recipe: Recipe) -> int:
    """Return the tokens of a prompt beyond the positions that the unscaled base was made for, at most
    data.max_length; 0 if samples are shorter, or nothing is scaled."""
    if recipe.model.rope_scaling is None:
        return 0
    before = positions.of(base.configuration(recipe.model).to_dict(), recipe.model.name_or_path)
    if before is None or recipe.data.max_length <= before.tokens:
        return 0
    return min(recipe.data.max_length, before.tokens + _PROBED)


def _frequencies(config: Any, parameters: dict[str, Any]) -> int:
    """Return the frequencies of a head, as transformers' modeling_rope_utils counts them."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size * (parameters.get("partial_rotary_factor") or 1.0)) // 2
