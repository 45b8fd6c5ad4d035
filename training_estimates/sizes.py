"""The sizes of a decoder that estimates of memory and time need, wherever they were counted."""

import re
from collections.abc import Iterable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from training_estimates.meta_model import ENCODERS

_FUSED = re.compile(r".*\.experts\.(?!\d)\w+(?<!\.weight)|.*\.(?:input|output)_linear\.weight")


def is_fused_name(name: str) -> bool:
    """Return whether a name is that of a parameter of routed experts; those that all tokens pass have other
    names."""
    return _FUSED.fullmatch(name) is not None


class Immutable(BaseModel):
    """Model without unknown fields that is not changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Linear(Immutable):
    """All matrices of one name and shape in a model's layers."""

    name: str
    """Name of the module without `_proj`: q, k, v, o, gate, up, down in Llama's layout."""
    rows: int
    """Width of the input."""
    columns: int
    """Width of the output."""
    count: int
    """Matrices in all layers together."""
    path: str = ""
    """Name within a layer: self_attn.q_proj."""
    share: float = 1.0
    """Share of a batch's tokens that pass one of them; of a routed expert, experts a token over experts."""
    quantizable: bool = True
    """True if bitsandbytes quantizes them: it takes nn.Linear, and no experts that are stacked in one
    parameter."""
    adaptable: bool = True
    """True if method.target_modules all-linear gives them adapters: those of nn.Linear, but neither head nor
    router."""
    layers: tuple[int, ...] = ()
    """Numbers of the layers that have them, which stand for the `*` of path; all layers where there are
    none."""
    modules: int = 0
    """Modules that compute with them, where several share a matrix and each gets an adapter of its own; 0
    where none do."""

    @property
    def is_experts(self) -> bool:
        """True if they are the matrices in a parameter of a layer's routed experts, which method.experts
        adapts."""
        stacked = not self.quantizable and not self.adaptable
        return stacked and (
            self.path.split(".")[-2:-1] == ["experts"] or self.path.endswith("_linear.weight")
        )

    @property
    def key(self) -> str:
        """Text by which the matrices differ from all others of a model."""
        return f"{self.path} {self.rows}x{self.columns}"

    @property
    def parameters(self) -> int:
        return self.count * self.rows * self.columns


class Tower(Immutable):
    """Sizes of the part of a vision-language model that reads images."""

    layers: int
    hidden_size: int
    intermediate_size: int
    """Width of a layer's MLP."""
    is_gated: bool
    """True if the MLP has three matrices, False for two."""
    attention_kept: int
    """Numbers of hidden size that the attention of a trained layer keeps for its backward pass."""
    mlp_kept: int
    """Numbers of the MLP's width that a trained layer keeps for its backward pass."""
    patches_of_token: float
    """Patches of an image for each of its tokens in the text."""
    patch_size: int
    """Pixels of a patch's side."""
    image_size: int | None
    """Pixels of the side to which each image, or each tile of one, is resized; None where images keep their
    size."""
    window_layers: int
    """Layers in which a patch attends to those of its window alone; in all others to those of its image."""
    window_size: int
    """Pixels of a window's side."""
    masked: bool
    """True if the patches of all images of a batch are one sequence with a mask, False if each image is a
    sequence of its own."""


class Geometry(Immutable):
    """Sizes of a decoder; counts are parameters."""

    model_type: str
    dtype: str | None
    """Dtype of the published weights."""
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    linears: list[Linear]
    """Linear layers of all decoder layers: attention and MLP, every expert, no router."""
    tie_word_embeddings: bool
    quantized: str | None = None
    """Quantization of the published weights (bitsandbytes, gptq ...); None if they are not quantized."""
    extra: int
    """All other parameters: norms, biases, routers, learned positions, and what is not of Llama's layout."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    """Width of one MLP, of one expert."""
    gated: bool
    """True if the MLP has three matrices (gate, up, down), False for two."""
    experts: int = 1
    experts_per_token: int = 1
    shared_intermediate_size: int = 0
    """Width of the experts that every token passes, together."""
    dense_layers: int = 0
    """Layers without experts in a model that has them in others."""
    dense_intermediate_size: int = 0
    """Width of the MLP of those layers."""
    largest_layer: int | None = None
    """Parameters in the linear layers of the largest layer; None where all layers are alike."""
    unsupported: str | None = None
    """Part of this model that the closed form of activations and time does not know; None where it holds."""
    counted: str = "config.json"
    """Source of the sizes: config.json (closed form), safetensors headers, or transformers' own code."""
    decoder: str | None = None
    """Name of the text decoder in a model of several parts; None if there is one part."""
    outside: int = 0
    """Parameters outside of that decoder, its embedding and head: of what reads images or sound."""
    tower: Tower | None = None
    """The part of those that reads images; None where there is none, or its sizes are unknown."""
    embedding: str = "model.embed_tokens"
    """Name of the module of the input embedding."""
    head: str = "lm_head"
    """Name of the module of the head."""
    tried_as: str | None = None
    """Model type of config.json that model_types.json has a row of, where it is not that of the decoder."""
    own_logits: str | None = None
    """Reason why its loss is computed of all of its logits; None where TRL's chunked loss is its own."""
    loss_problem: str | None = None
    """Reason why its loss cannot be computed; None where it can."""
    own_labels: tuple[str, ...] | None = None
    """Names of the labels of its own head, in order; None where its head is that of words."""
    positions: int | None = None
    """Tokens of a sequence that the model was made for; None where it sets no limit, or config.json does not
    say."""
    bounds_positions: bool = False
    """True if it fails on longer sequences."""
    rope_type: str | None = None
    """Scaling of its rotary embedding, by config.json's name; None if there is none."""
    left_out: str | None = None
    """Stored tensors that transformers does not load, with their parameters; None if there are none."""

    @property
    def groups_experts(self) -> bool:
        """True if a layer's experts are one parameter, whose products transformers 5 computes together
        (grouped_mm)."""
        return any(linear.is_experts for linear in self.linears)

    @property
    def linear_parameters(self) -> int:
        """Return the parameters of the linear layers of all decoder layers."""
        return sum(linear.parameters for linear in self.linears)

    @property
    def quantizable_parameters(self) -> int:
        """Return the parameters of those linear layers that bitsandbytes quantizes."""
        return sum(linear.parameters for linear in self.linears if linear.quantizable)

    @property
    def active_parameters(self) -> int:
        """Return the parameters of the linear layers that one token passes."""
        return round(sum(linear.share * linear.parameters for linear in self.linears))

    @property
    def layer_parameters(self) -> float:
        """Return the parameters in the linear layers of the largest decoder layer."""
        return (
            self.linear_parameters / self.num_hidden_layers
            if self.largest_layer is None
            else float(self.largest_layer)
        )

    @property
    def table_parameters(self) -> int:
        """Return the parameters of a table of words: the input embedding, or the head."""
        return self.vocab_size * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Return the parameters of the input embedding, and of the head if it is not tied."""
        return self.table_parameters * (1 if self.tie_word_embeddings else 2)

    def with_head_of(self, outputs: int) -> Self:
        """Return the sizes with a head of so many outputs in the place of the language model's."""
        extra = self.extra + self.head_parameters(outputs)
        return self.model_copy(update={"tie_word_embeddings": True, "extra": extra})

    def head_parameters(self, outputs: int) -> int:
        """Return the parameters of a head of so many outputs: a matrix; of an encoder also a layer before it,
        and the biases of both."""
        if self.model_type in ENCODERS and outputs:
            return (self.hidden_size + outputs) * (self.hidden_size + 1)
        return outputs * self.hidden_size

    @property
    def parameters(self) -> int:
        return self.linear_parameters + self.embedding_parameters + self.extra


def joined(linears: Iterable[Linear]) -> list[Linear]:
    """Return the linear layers with those that differ in nothing but their places joined, in the order of the
    first of each."""
    groups: dict[Linear, list[Linear]] = {}
    for linear in linears:
        groups.setdefault(linear.model_copy(update={"count": 1, "layers": (), "modules": 0}), []).append(
            linear
        )

    def one_of(alike: list[Linear]) -> dict[str, Any]:
        modules = (
            sum(alike_linear.modules or alike_linear.count for alike_linear in alike)
            if any(alike_linear.modules for alike_linear in alike)
            else 0
        )
        layers = sorted({layer for alike_linear in alike for layer in alike_linear.layers})
        return {
            "count": sum(alike_linear.count for alike_linear in alike),
            "layers": tuple(layers),
            "modules": modules,
        }

    return [alike_linear.model_copy(update=one_of(alike)) for alike_linear, alike in groups.items()]
