"""Problems of a recipe with its base model, which no shape solves."""

import json
import math
from collections.abc import Iterator

from flytune.models import config_json, heads, liger, model_types, sequence_parallel
from flytune.recipe import Recipe
from flytune.sentences import counted
from training_estimates.meta_model import ENCODERS
from training_estimates.sizes import Geometry

TRAINABLE_QUANTIZATION = "bitsandbytes"
"""Published quantization whose weights train an adapter: the libraries of all others, or the gradients of
their kernels, are missing."""


def of_base(recipe: Recipe, geometry: Geometry, in_slices: bool) -> list[str]:
    """List the problems of a recipe with a base model of these sizes, a sentence each.

    Args:
        in_slices: True if each process reads its own part of the weights only.
    """
    return [
        *_of_method(recipe, geometry, in_slices),
        *_of_model(recipe, geometry),
        *_of_training(recipe, geometry),
        *_of_sequences(recipe, geometry),
        *_of_data(recipe, geometry),
    ]


def is_beyond(recipe: Recipe, geometry: Geometry) -> bool:
    """Return whether samples may be longer than what the base was made for."""
    return geometry.positions is not None and recipe.data.max_length > geometry.positions


def _of_method(recipe: Recipe, geometry: Geometry, in_slices: bool) -> Iterator[str]:
    """Yield the problems of the section method."""
    name, quantized, method = recipe.model.name_or_path, geometry.quantized, recipe.method
    trusts_code = recipe.model.trust_remote_code
    # As causal language models encoders see what they predict; vectors and classes of texts are no words.
    predicts_words = heads.head_of(recipe).answers_in not in (heads.VECTORS, heads.PROBABILITIES)
    is_encoder = geometry.model_type in ENCODERS and not predicts_words
    reason = model_types.training_problem(
        _kind(geometry), method.name, in_slices, trusts_code, method.experts
    )
    if reason and not is_encoder:
        yield f"model.name_or_path {name}: {_kind(geometry)} with method {method.name}: {reason}"
    if quantized and method.name == "full":
        yield (
            f"method: full, but the weights of {name} are quantized ({quantized}): they have no gradients; "
            "train an adapter on them (method: qlora), or name the 16-bit model that they were made from"
        )
    elif quantized and quantized != TRAINABLE_QUANTIZATION:
        yield (
            f"method: {method.name}, but the weights of {name} are quantized ({quantized}): of quantized "
            f"weights only those of {TRAINABLE_QUANTIZATION} train an adapter here; name the 16-bit model "
            "that they were made from"
        )
    elif quantized and method.name == "qlora":
        yield from _of_published_format(recipe)


def _of_published_format(recipe: Recipe) -> Iterator[str]:
    """Yield the fields of method that the published weights, which are not quantized again, do not have."""
    section = config_json.published_quantization(recipe.model)
    if section.get("load_in_8bit"):
        published: dict[str, object] = {"load_in_8bit": True}
    else:
        # The defaults are those of transformers' BitsAndBytesConfig.
        published = {
            "load_in_8bit": False,
            "bnb_4bit_quant_type": section.get("bnb_4bit_quant_type", "fp4"),
            "bnb_4bit_use_double_quant": section.get("bnb_4bit_use_double_quant", False),
        }
    differing = {key: value for key, value in published.items() if getattr(recipe.method, key) != value}
    if differing:
        written = ", ".join(f"{key}: {json.dumps(value)}" for key, value in differing.items())
        yield (
            f"method: {recipe.method.quantized}, but the weights of {recipe.model.name_or_path} were "
            f"published quantized in another format, in which they would be trained; write {written}"
        )


def _of_model(recipe: Recipe, geometry: Geometry) -> Iterator[str]:
    """Yield the problems of the section model."""
    model = recipe.model
    kind = _kind(geometry)
    if reason := model_types.attention_problem(kind, model.attn_implementation, model.trust_remote_code):
        yield f"model.attn_implementation: {reason}"
    if model.dtype == "float32" and model.attn_implementation.startswith("flash"):
        yield (
            "model.attn_implementation: FlashAttention computes in 16 bits; use sdpa, or another model.dtype"
        )
    if model.dtype != "float32" and (reason := model_types.dtype_problem(kind, model.trust_remote_code)):
        yield f"model.dtype: {reason}"
    if model.dtype == "float16" and geometry.dtype == "bfloat16":
        yield (
            f"model.dtype: float16, but {model.name_or_path} was trained in bfloat16, whose range float16 "
            "does not have (its activations overflow); use bfloat16 or float32"
        )
    if reason := heads.head_of(recipe).loss_problem(geometry):
        yield f"model.name_or_path: {model.name_or_path}: {reason}"
    if model.revision is not None and (
        model.name_or_path.startswith((".", "/", "~")) or "://" in model.name_or_path
    ):
        yield "model.revision: only models on the hub have one, folders and addresses do not"


def _of_training(recipe: Recipe, geometry: Geometry) -> Iterator[str]:
    """Yield the problems of the section training."""
    training, trusts_code = recipe.training, recipe.model.trust_remote_code
    if training.activation_checkpointing and (
        reason := model_types.checkpointing_problem(_kind(geometry), trusts_code)
    ):
        yield f"training.activation_checkpointing: {reason}"
    if training.router_aux_loss_coef and geometry.experts == 1:
        yield (
            f"training.router_aux_loss_coef: {geometry.model_type} has no experts, and no balance loss of "
            "them; leave it out"
        )
    if training.use_liger_kernel and (reason := liger.refusal(geometry.model_type, trusts_code)):
        yield f"training.use_liger_kernel: {reason}"


def _of_sequences(recipe: Recipe, geometry: Geometry) -> Iterator[str]:
    """Yield the problems of sharding.sequence_parallel."""
    parts, kind, name = recipe.sharding.sequence_parallel, _kind(geometry), recipe.model.name_or_path
    if parts == 1:
        return
    given = f"sharding.sequence_parallel: {parts}"
    if recipe.model.trust_remote_code or kind not in sequence_parallel.TYPES:
        what = "code of its own" if recipe.model.trust_remote_code else kind
        yield (
            f"{given}: no test shows that processes which divide samples compute what one does with {name} "
            f"({what}); leave it out (types that go: docs/long-sequences.md)"
        )
    heads = math.gcd(geometry.num_attention_heads, geometry.num_key_value_heads)
    if heads % parts:
        able = [count for count in range(1, heads + 1) if heads % count == 0]
        yield (
            f"{given} does not divide the {geometry.num_attention_heads} heads and "
            f"{geometry.num_key_value_heads} key/value heads of {name}; numbers that do: "
            f"{', '.join(map(str, able))}"
        )
    scaling = recipe.model.rope_scaling
    rope_type = scaling.rope_type if scaling else geometry.rope_type
    if rope_type in ("dynamic", "longrope"):
        yield (
            f"{given} with a {rope_type} rotary embedding: its frequencies follow from the length of a "
            "sample, and a process knows that of its part; scale it with yarn (model.rope_scaling), or leave "
            "it out"
        )
    if geometry.experts > 1 and recipe.training.router_aux_loss_coef is None:
        yield (
            f"{given}: the routers of {kind} would be balanced over a part of each sample; write "
            "training.router_aux_loss_coef: 0"
        )


def _of_data(recipe: Recipe, geometry: Geometry) -> Iterator[str]:
    """Yield the problems of the section data."""
    model = recipe.model
    if geometry.bounds_positions and is_beyond(recipe, geometry):
        yield (
            f"data.max_length: {counted(recipe.data.max_length, 'token')}, but {model.name_or_path} "
            f"({geometry.model_type}) has {counted(geometry.positions or 0, 'position')}, and fails on a "
            "longer sample; write at most as many"
        )
    if recipe.data.packing and (
        reason := model_types.packing_problem(
            _kind(geometry), model.attn_implementation, model.trust_remote_code
        )
    ):
        yield f"data.packing: {reason}"


def _kind(geometry: Geometry) -> str:
    """Return the model type that was tried in small."""
    return geometry.tried_as or geometry.model_type
