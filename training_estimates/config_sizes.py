"""Sizes of a model of Llama's layout, counted from its config.json in closed form."""

from dataclasses import dataclass
from typing import Any

from training_estimates.config_json import MOST_LAYERS, Config, text_part
from training_estimates.errors import SizesError
from training_estimates.sizes import Geometry, Linear, joined

_LLAMA = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
_NAMES = (*"qkvo", "gate", "up", "down")


@dataclass(frozen=True)
class ModelType:
    """Differences of a model type's sizes from Llama's."""

    gated: bool = True
    """True if the MLP has three matrices (gate, up, down), False for two (up, down)."""
    tied: bool = False
    """True if the head is tied where config.json does not say."""
    attention_bias: bool | str = "attention_bias"
    """True if the attention's linear layers have biases; or the key that says so, with its default in `default_bias`."""
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
    """Norms of queries and keys: `head` with a weight for each channel of a head, `width` for each channel of all heads."""
    head_dim: int | None = None
    """Width of a head where config.json does not say; None: hidden size over heads."""
    key_value_heads: int | None = None
    """Heads of keys and values where config.json does not say; None: those of queries."""
    experts: bool = False
    layers: str = "model.layers"
    """Module that holds the decoder layers."""
    paths: tuple[str, ...] = _LLAMA
    """Names of the linear layers within a decoder layer. `qkv` and `gate_up` are each one matrix."""
    is_built: bool = True
    """False if transformers builds another model of this type: the sizes are those of published runs alone."""


KINDS = {
    "gemma": ModelType(tied=True, head_dim=256, key_value_heads=16),
    "gemma2": ModelType(tied=True, norms=4, head_dim=256, key_value_heads=4),
    "gemma3_text": ModelType(tied=True, norms=4, head_norms="head", head_dim=256, key_value_heads=4),
    "gpt_neox": ModelType(
        gated=False, mlp_bias=True, default_bias=True, layer_norm=True, layers="gpt_neox.layers",
        paths=("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "granite": ModelType(mlp_bias="mlp_bias"),
    "llama": ModelType(mlp_bias="mlp_bias"),
    "mistral": ModelType(attention_bias=False, key_value_heads=8),
    "mixtral": ModelType(attention_bias=False, key_value_heads=8, experts=True),
    # transformers knows positions as slopes alone, and an MLP of four times the width.
    "mpt": ModelType(gated=False, attention_bias=False, tied=True, is_built=False),
    "olmo2": ModelType(head_norms="width"),
    "phi": ModelType(
        gated=False, attention_bias=True, mlp_bias=True, head_bias=True, norms=1, layer_norm=True,
        paths=(*_LLAMA[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2"),
    ),
    "phi3": ModelType(attention_bias=False, paths=("self_attn.qkv_proj", _LLAMA[3], "mlp.gate_up_proj", _LLAMA[6])),
    # The first Qwen brings its own code.
    "qwen": ModelType(
        attention_bias=False, qkv_bias=True, layers="transformer.h",
        paths=("attn.c_attn", "attn.c_proj", "mlp.w2", "mlp.w1", "mlp.c_proj"),
    ),
    "qwen2": ModelType(attention_bias=False, qkv_bias=True, key_value_heads=32),
    "qwen3": ModelType(head_norms="head", head_dim=128, key_value_heads=32),
    "qwen3_moe": ModelType(head_norms="head", key_value_heads=4, experts=True),
    "smollm3": ModelType(mlp_bias="mlp_bias", tied=True, key_value_heads=4),
    "starcoder2": ModelType(
        gated=False, attention_bias="use_bias", mlp_bias="use_bias", default_bias=True, layer_norm=True, tied=True,
        key_value_heads=2, paths=(*_LLAMA[:4], "mlp.c_fc", "mlp.c_proj"),
    ),
}  # fmt: skip
"""Model types that the closed form counts; tests compare each with what transformers builds (test_counting.py)."""


def geometry(config: dict[str, Any], name: str, as_llama: bool = False) -> Geometry:
    """Return the sizes in a config.json of one of KINDS.

    Args:
        config: the content.
        name: what names the model in messages.
        as_llama: whether linear layers have Llama's seven names, and experts are modules, whatever transformers builds;
            litgpt, and transformers before 5, train them so.

    Raises:
        SizesError: it lacks a size, has a wrong one, or is of another model type.
    """
    found = text_part(config, name)
    if found.kind not in KINDS:
        found.check()
        raise SizesError(f"{name}: the sizes of a {found.kind:.40} do not follow from its config.json in closed form")
    return _count(_with_llama_keys(found), KINDS[found.kind], Config(config, name).quantized, as_llama)


def _count(config: Config, kind: ModelType, quantized: str | None, as_llama: bool) -> Geometry:
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers", most=MOST_LAYERS)
    heads, vocabulary = config.size("num_attention_heads"), config.size("vocab_size")
    dense_width = config.size("intermediate_size")
    key_value_heads = heads
    if config.content.get("num_key_value_heads", kind.key_value_heads) is not None:
        key_value_heads = config.size("num_key_value_heads", kind.key_value_heads)
    if heads % key_value_heads:
        config.problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {key_value_heads}")
    missing = kind.head_dim if "head_dim" not in config.content else None
    head = config.size("head_dim", missing or max(1, hidden // heads))
    if "head_dim" not in config.content and not missing and hidden % heads:
        config.problems.append(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim"
        )
    query, key = heads * head, key_value_heads * head
    experts, chosen, width, dense = 1, 1, dense_width, tuple[int, ...]()
    if kind.experts:
        usual = "num_local_experts" if config.kind == "mixtral" else "num_experts"
        name = next((one for one in ("num_local_experts", "num_experts") if config.content.get(one) is not None), usual)
        experts, chosen = config.size(name, least=0), config.size("num_experts_per_tok")
        if config.kind != "mixtral":
            width = config.size("moe_intermediate_size")
            step, only = config.size("decoder_sparse_step", 1), config.indices("mlp_only_layers")
            dense = tuple(at for at in range(layers) if at in only or not experts or (at + 1) % step != 0)
        if experts and chosen > experts:
            config.problems.append(f"num_experts_per_tok {chosen} is more than {name} {experts}")
        if experts <= 1:
            config.problems.append(f"{name} is {experts}, which is not a number of experts to choose from")
        elif len(dense) == layers:
            config.problems.append("mlp_only_layers and decoder_sparse_step leave no layer with experts to choose from")
    tied = config.flag("tie_word_embeddings", kind.tied)
    attention_bias, mlp_bias = (
        config.flag(flag, kind.default_bias) if isinstance(flag, str) else flag for flag in (kind.attention_bias, kind.mlp_bias)
    )
    learned, dtype = config.size("learned_positions", 0, least=0), config.dtype
    config.check()

    attention = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    paths = _LLAMA if as_llama else kind.paths
    if not as_llama and ("qkv" in paths[0] or "query_key_value" in paths[0] or "c_attn" in paths[0]):
        attention = [(hidden, query + 2 * key), (query, hidden)]
    up = [(hidden, 2 * width)] if any("gate_up" in path for path in paths) else [(hidden, width)] * (2 if kind.gated else 1)
    mlp = [*up, (width, hidden)]
    if paths is _LLAMA and not kind.gated:
        paths = (*paths[:4], *paths[5:])
    at = len(attention)
    moe = layers - len(dense)
    share = chosen / experts
    stacked = experts > 1 and not as_llama
    linears = [
        Linear(name=_short(path), rows=rows, columns=columns, count=layers, path=f"{kind.layers}.*.{path}")
        for path, (rows, columns) in zip(paths[:at], attention, strict=True)
    ]
    if stacked:
        # transformers 5 has gate and up of a layer's experts in one parameter.
        of_experts = tuple(layer for layer in range(layers) if layer not in dense) if dense else ()
        for name, (rows, columns) in {"gate_up_proj": (hidden, 2 * width), "down_proj": (width, hidden)}.items():
            place = f"{kind.layers}.*.mlp.experts.{name}"
            one = Linear(name=_short(name), rows=rows, columns=columns, count=moe * experts, path=place, share=share)
            linears.append(one.model_copy(update={"quantizable": False, "adaptable": False, "layers": of_experts}))
    for path, (rows, columns) in zip(paths[at:], mlp, strict=True):
        full = f"{kind.layers}.*.{path.replace('mlp.', 'mlp.experts.') if experts > 1 else path}"
        one = Linear(name=_short(path), rows=rows, columns=columns, count=moe * experts, path=full, share=share)
        if not stacked:
            linears.append(one)
        if dense:
            rows, columns = (hidden, dense_width) if rows == hidden and columns == width else (dense_width, hidden)
            place = f"{kind.layers}.*.{path}"
            linears.append(Linear(name=one.name, rows=rows, columns=columns, count=len(dense), path=place, layers=dense))
    vectors = 2 if kind.layer_norm else 1
    norms = kind.norms * vectors * hidden
    norms += {"": 0, "head": 2 * head, "width": query + key}[kind.head_norms]
    if config.kind == "phi" and config.content.get("qk_layernorm"):
        norms += 4 * head
    biases = (query + 2 * key + hidden) * attention_bias + (query + 2 * key) * kind.qkv_bias
    biases += (sum(columns for _, columns in mlp)) * mlp_bias
    router = hidden * experts if experts > 1 else 0
    each = query * hidden * 2 + 2 * hidden * key
    sizes = (each + experts * sum(rows * columns for rows, columns in mlp), each + 3 * hidden * dense_width)
    return Geometry(
        model_type=config.kind,
        dtype=dtype,
        hidden_size=hidden,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        linears=joined(linears),
        quantized=quantized,
        tie_word_embeddings=tied,
        extra=layers * (norms + biases) + moe * router + (vectors + learned) * hidden + vocabulary * kind.head_bias,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head,
        intermediate_size=width,
        gated=kind.gated,
        experts=experts,
        experts_per_token=chosen,
        dense_layers=len(dense),
        dense_intermediate_size=dense_width if dense else 0,
        largest_layer=max(sizes) if dense else None,
        embedding=f"{kind.layers.rpartition('.')[0]}.{'embed_in' if config.kind == 'gpt_neox' else 'embed_tokens'}",
        head="embed_out" if config.kind == "gpt_neox" else "lm_head",
    )


def _short(path: str) -> str:
    return path.rpartition(".")[2].removesuffix("_proj")


def _with_llama_keys(config: Config) -> Config:
    """Return the config with Llama's keys, if its model type has other keys for the same sizes."""
    content = config.content
    if config.kind == "mpt":
        hidden, more = config.size("d_model"), config.table("attn_config")
        content = content | {
            "hidden_size": hidden,
            "num_hidden_layers": content.get("n_layers"),
            "num_attention_heads": content.get("n_heads"),
            "intermediate_size": hidden * config.size("expansion_ratio", 4),
            # Positions are a table of vectors, unless they are slopes added to the scores.
            "learned_positions": 0 if more.get("alibi") else config.size("max_seq_len", 2048),
        }
    if config.kind == "qwen":
        # The first Qwen counts gate and up together.
        content = content | {"intermediate_size": config.size("intermediate_size") // 2}
    if config.kind == "gpt_neox":
        content = {key: value for key, value in content.items() if key not in ("num_key_value_heads", "head_dim")}
    changed = Config(content, config.name)
    changed.problems += config.problems
    return changed
