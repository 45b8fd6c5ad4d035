"""Sizes of a model of Llama's layout, counted from its config.json in closed form."""

from dataclasses import dataclass
from typing import Any

from training_estimates.config_json import MOST_LAYERS, Config, text_part
from training_estimates.errors import SizesError
from training_estimates.sizes import Geometry, Linear, joined

LLAMA = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_MLP = "mlp."
"""Beginning of the paths of an MLP's layers."""


@dataclass(frozen=True)
class ModelType:
    """Differences of a model type's sizes from Llama's."""

    gated: bool = True
    """True if the MLP has three matrices (gate, up, down), False for two (up, down)."""
    tied: bool = False
    """True if the head is tied where config.json does not say."""
    attention_bias: bool | str = "attention_bias"
    """True if the attention's linear layers have biases; or the key that says so, with its default in
    `default_bias`."""
    mlp_bias: bool | str = False
    default_bias: bool = False
    qkv_bias: bool = False
    """True if queries, keys and values alone have biases."""
    head_bias: bool = False
    norms: int = 2
    """Norms of hidden size in a layer."""
    layer_norm: bool = False
    """True for torch's LayerNorm, which has a bias."""
    head_norms: str = ""
    """Norms of queries and keys: `head` with a weight for each channel of a head, `width` for each channel of
    all heads."""
    head_dim: int | None = None
    """Width of a head where config.json does not say; None: hidden size over heads."""
    key_value_heads: int | None = None
    """Heads of keys and values where config.json does not say; None: those of queries."""
    groups_heads: bool = True
    """False if num_key_value_heads and head_dim of config.json have no effect."""
    has_experts: bool = False
    stacks_experts: bool = True
    """True if gate and up of a layer's experts are one parameter, and down another, as in transformers 5."""
    layers: str = "model.layers"
    """Module that holds the decoder layers."""
    paths: tuple[str, ...] = LLAMA
    """Names of the linear layers within a decoder layer. `qkv` and `gate_up` are each one matrix."""
    embedding: str = "embed_tokens"
    """Name of the input embedding, beside the decoder layers."""
    head: str = "lm_head"


KINDS = {
    "gemma": ModelType(tied=True, head_dim=256, key_value_heads=16),
    "gemma2": ModelType(tied=True, norms=4, head_dim=256, key_value_heads=4),
    "gemma3_text": ModelType(tied=True, norms=4, head_norms="head", head_dim=256, key_value_heads=4),
    "gpt_neox": ModelType(
        gated=False,
        mlp_bias=True,
        default_bias=True,
        layer_norm=True,
        groups_heads=False,
        layers="gpt_neox.layers",
        embedding="embed_in",
        head="embed_out",
        paths=("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "granite": ModelType(mlp_bias="mlp_bias"),
    "llama": ModelType(mlp_bias="mlp_bias"),
    "mistral": ModelType(attention_bias=False, key_value_heads=8),
    "mixtral": ModelType(attention_bias=False, key_value_heads=8, has_experts=True),
    "olmo2": ModelType(head_norms="width"),
    "phi": ModelType(
        gated=False,
        attention_bias=True,
        mlp_bias=True,
        head_bias=True,
        norms=1,
        layer_norm=True,
        paths=(*LLAMA[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2"),
    ),
    "phi3": ModelType(
        attention_bias=False, paths=("self_attn.qkv_proj", LLAMA[3], "mlp.gate_up_proj", LLAMA[6])
    ),
    "qwen2": ModelType(attention_bias=False, qkv_bias=True, key_value_heads=32),
    "qwen3": ModelType(head_norms="head", head_dim=128, key_value_heads=32),
    "qwen3_moe": ModelType(head_norms="head", key_value_heads=4, has_experts=True),
    "smollm3": ModelType(mlp_bias="mlp_bias", tied=True, key_value_heads=4),
    "starcoder2": ModelType(
        gated=False,
        attention_bias="use_bias",
        mlp_bias="use_bias",
        default_bias=True,
        layer_norm=True,
        tied=True,
        key_value_heads=2,
        paths=(*LLAMA[:4], "mlp.c_fc", "mlp.c_proj"),
    ),
}
"""Model types that the closed form counts; tests compare each with what transformers builds
(test_counting.py)."""


def geometry(config: dict[str, Any], name: str, kind: ModelType | None = None) -> Geometry:
    """Return the sizes in a config.json of one of KINDS.

    Args:
        config: the content.
        name: what names the model in messages.
        kind: the model type, where it is none of KINDS.

    Raises:
        SizesError: it lacks a size, has a wrong one, or is of another model type.
    """
    part = text_part(config, name)
    kind = kind or KINDS.get(part.kind)
    if kind is None:
        part.check()
        raise SizesError(
            f"{name}: the sizes of a {part.kind:.40} do not follow from its config.json in closed form"
        )
    return _geometry(part, kind, Config(config, name).quantized)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Sizes of a layer's attention."""

    heads: int
    key_value_heads: int
    head: int
    """Width of a head."""

    @property
    def query(self) -> int:
        return self.heads * self.head

    @property
    def key(self) -> int:
        return self.key_value_heads * self.head


@dataclass(frozen=True, slots=True)
class _Mlps:
    """Sizes of the MLPs of all layers."""

    width: int
    """Width of a layer's MLP; of one expert, where there are experts."""
    experts: int = 1
    chosen: int = 1
    """Experts that a token passes."""
    dense: tuple[int, ...] = ()
    """Layers that have one MLP where the others have experts."""
    dense_width: int = 0


def _geometry(config: Config, kind: ModelType, quantized: str | None) -> Geometry:
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers", most=MOST_LAYERS)
    vocabulary = config.size("vocab_size")
    attention, mlps = _attention(config, kind, hidden), _mlps(config, kind, layers)
    tied, dtype = config.flag("tie_word_embeddings", kind.tied), config.dtype
    extra = _extra(config, kind, hidden, layers, attention, mlps)
    config.check()

    of_attention = _attention_linears(kind, hidden, layers, attention)
    of_experts = _expert_linears(kind, hidden, layers, mlps) if kind.has_experts else []
    of_mlps = _mlp_linears(kind, hidden, layers, mlps)
    return Geometry(
        model_type=config.kind,
        dtype=dtype,
        hidden_size=hidden,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        linears=joined([*of_attention, *of_experts, *of_mlps]),
        quantized=quantized,
        tie_word_embeddings=tied,
        extra=extra + vocabulary * kind.head_bias,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.key_value_heads,
        head_dim=attention.head,
        intermediate_size=mlps.width,
        gated=kind.gated,
        experts=mlps.experts,
        experts_per_token=mlps.chosen,
        dense_layers=len(mlps.dense),
        dense_intermediate_size=mlps.dense_width,
        largest_layer=_largest_layer(of_attention, of_experts, of_mlps, layers, mlps) if mlps.dense else None,
        embedding=f"{kind.layers.rpartition('.')[0]}.{kind.embedding}",
        head=kind.head,
    )


def _attention(config: Config, kind: ModelType, hidden: int) -> _Attention:
    heads = config.size("num_attention_heads")
    key_value_heads = heads
    if kind.groups_heads and config.content.get("num_key_value_heads", kind.key_value_heads) is not None:
        key_value_heads = config.size("num_key_value_heads", kind.key_value_heads)
    if heads % key_value_heads:
        config.problems.append(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {key_value_heads}"
        )
    if kind.groups_heads and "head_dim" in config.content:
        return _Attention(heads, key_value_heads, config.size("head_dim", max(1, hidden // heads)))
    if kind.head_dim is None and hidden % heads:
        config.problems.append(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim"
        )
    return _Attention(heads, key_value_heads, kind.head_dim or max(1, hidden // heads))


def _mlps(config: Config, kind: ModelType, layers: int) -> _Mlps:
    width = config.size("intermediate_size")
    if not kind.has_experts:
        return _Mlps(width)
    is_mixtral = config.kind == "mixtral"
    names = [name for name in ("num_local_experts", "num_experts") if config.content.get(name) is not None]
    usual = "num_local_experts" if is_mixtral else "num_experts"
    name = names[0] if names else usual
    experts, chosen = config.size(name, least=0), config.size("num_experts_per_tok")
    dense: tuple[int, ...] = ()
    expert_width = width
    if not is_mixtral:
        expert_width = config.size("moe_intermediate_size")
        step, listed = config.size("decoder_sparse_step", 1), config.indices("mlp_only_layers")
        dense = tuple(
            layer for layer in range(layers) if layer in listed or not experts or (layer + 1) % step != 0
        )
    if experts and chosen > experts:
        config.problems.append(f"num_experts_per_tok {chosen} is more than {name} {experts}")
    if experts <= 1:
        config.problems.append(f"{name} is {experts}, which is not a number of experts to choose from")
    elif len(dense) == layers:
        config.problems.append(
            "mlp_only_layers and decoder_sparse_step leave no layer with experts to choose from"
        )
    return _Mlps(expert_width, max(1, experts), chosen, dense, width if dense else 0)


def _attention_linears(kind: ModelType, hidden: int, layers: int, attention: _Attention) -> list[Linear]:
    query, key = attention.query, attention.key
    paths = [path for path in kind.paths if not path.startswith(_MLP)]
    shapes = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    if len(paths) == 2:
        shapes = [(hidden, query + 2 * key), (query, hidden)]
    return [_linear(kind, path, shape, count=layers) for path, shape in zip(paths, shapes, strict=True)]


def _mlp_linears(kind: ModelType, hidden: int, layers: int, mlps: _Mlps) -> list[Linear]:
    """Return the linear layers of MLPs that each token passes."""
    if kind.has_experts and not mlps.dense:
        return []
    count, width = (len(mlps.dense), mlps.dense_width) if kind.has_experts else (layers, mlps.width)
    return [
        _linear(kind, path, shape, count=count, layers=mlps.dense)
        for path, shape in zip(_mlp_paths(kind), _mlp_shapes(kind, hidden, width), strict=True)
    ]


def _expert_linears(kind: ModelType, hidden: int, layers: int, mlps: _Mlps) -> list[Linear]:
    """Return the matrices of all experts."""
    count, share = (layers - len(mlps.dense)) * mlps.experts, mlps.chosen / mlps.experts
    if not kind.stacks_experts:
        paths = [path.replace(_MLP, f"{_MLP}experts.") for path in _mlp_paths(kind)]
        shapes = _mlp_shapes(kind, hidden, mlps.width)
        return [
            _linear(kind, path, shape, count=count, share=share)
            for path, shape in zip(paths, shapes, strict=True)
        ]
    numbers = tuple(layer for layer in range(layers) if layer not in mlps.dense) if mlps.dense else ()
    stacked: dict[str, Any] = {
        "count": count,
        "share": share,
        "layers": numbers,
        "quantizable": False,
        "adaptable": False,
    }
    return [
        _linear(kind, f"{_MLP}experts.gate_up_proj", (hidden, 2 * mlps.width), **stacked),
        _linear(kind, f"{_MLP}experts.down_proj", (mlps.width, hidden), **stacked),
    ]


def _mlp_paths(kind: ModelType) -> list[str]:
    return [path for path in kind.paths if path.startswith(_MLP)]


def _mlp_shapes(kind: ModelType, hidden: int, width: int) -> list[tuple[int, int]]:
    """Return inputs and outputs of each matrix of an MLP; gate and up may be one."""
    inputs = {2: [(hidden, 2 * width if kind.gated else width)], 3: [(hidden, width), (hidden, width)]}
    return [*inputs[len(_mlp_paths(kind))], (width, hidden)]


def _linear(kind: ModelType, path: str, shape: tuple[int, int], **fields: Any) -> Linear:
    name = path.rpartition(".")[2].removesuffix("_proj")
    return Linear(name=name, rows=shape[0], columns=shape[1], path=f"{kind.layers}.*.{path}", **fields)


def _extra(
    config: Config, kind: ModelType, hidden: int, layers: int, attention: _Attention, mlps: _Mlps
) -> int:
    """Return the parameters of all norms, biases and routers."""
    query, key = attention.query, attention.key
    norm = 2 * hidden if kind.layer_norm else hidden
    of_heads = {"": 0, "head": 2 * attention.head, "width": query + key}[kind.head_norms]
    if config.kind == "phi" and config.content.get("qk_layernorm"):
        of_heads = 4 * attention.head
    biases = 0
    if _flag(config, kind, kind.attention_bias):
        biases += query + 2 * key + hidden
    if kind.qkv_bias:
        biases += query + 2 * key
    if _flag(config, kind, kind.mlp_bias):
        biases += sum(columns for _, columns in _mlp_shapes(kind, hidden, mlps.width))
    routers = (layers - len(mlps.dense)) * hidden * mlps.experts if kind.has_experts else 0
    return layers * (kind.norms * norm + of_heads + biases) + routers + norm


def _flag(config: Config, kind: ModelType, bias: bool | str) -> bool:
    return config.flag(bias, kind.default_bias) if isinstance(bias, str) else bias


def _largest_layer(
    attention: list[Linear], experts: list[Linear], dense: list[Linear], layers: int, mlps: _Mlps
) -> int:
    """Return the parameters in the linear layers of the larger of both kinds of layers."""
    with_experts = sum(expert.parameters for expert in experts) // (layers - len(mlps.dense))
    without = sum(linear.parameters for linear in dense) // len(mlps.dense)
    return sum(linear.parameters for linear in attention) // layers + max(with_experts, without)
