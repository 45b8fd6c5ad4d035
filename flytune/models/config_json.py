"""A config.json from outside: read strictly, and counted by the closed form where its model type is in Llama's layout."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytune import json_core
from flytune.errors import RecipeError
from flytune.models.sizes import Geometry, Linear, joined

LARGEST = 10_000_000
"""Bytes of a config.json that is read; published ones have kilobytes."""
MOST = 100_000_000
"""Largest number that is taken for a size."""
MOST_LAYERS = 2_000
"""Largest number of layers; building a model of more takes minutes."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIZE = re.compile(r"(^|_)(size|dim|rank|layers?|heads?|experts?|width|channels|groups|embd|inner|model)$|^(num|n)_")
_LLAMA = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
_NAMES = (*"qkvo", "gate", "up", "down")


@dataclass(frozen=True)
class Kind:
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
    "gemma": Kind(tied=True, head_dim=256, key_value_heads=16),
    "gemma2": Kind(tied=True, norms=4, head_dim=256, key_value_heads=4),
    "gemma3_text": Kind(tied=True, norms=4, head_norms="head", head_dim=256, key_value_heads=4),
    "gpt_neox": Kind(
        gated=False, mlp_bias=True, default_bias=True, layer_norm=True, layers="gpt_neox.layers",
        paths=("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "granite": Kind(mlp_bias="mlp_bias"),
    "llama": Kind(mlp_bias="mlp_bias"),
    "mistral": Kind(attention_bias=False, key_value_heads=8),
    "mixtral": Kind(attention_bias=False, key_value_heads=8, experts=True),
    # transformers knows positions as slopes alone, and an MLP of four times the width.
    "mpt": Kind(gated=False, attention_bias=False, tied=True, is_built=False),
    "olmo2": Kind(head_norms="width"),
    "phi": Kind(
        gated=False, attention_bias=True, mlp_bias=True, head_bias=True, norms=1, layer_norm=True,
        paths=(*_LLAMA[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2"),
    ),
    "phi3": Kind(attention_bias=False, paths=("self_attn.qkv_proj", _LLAMA[3], "mlp.gate_up_proj", _LLAMA[6])),
    # The first Qwen brings its own code.
    "qwen": Kind(
        attention_bias=False, qkv_bias=True, layers="transformer.h",
        paths=("attn.c_attn", "attn.c_proj", "mlp.w2", "mlp.w1", "mlp.c_proj"),
    ),
    "qwen2": Kind(attention_bias=False, qkv_bias=True, key_value_heads=32),
    "qwen3": Kind(head_norms="head", head_dim=128, key_value_heads=32),
    "qwen3_moe": Kind(head_norms="head", key_value_heads=4, experts=True),
    "smollm3": Kind(mlp_bias="mlp_bias", tied=True, key_value_heads=4),
    "starcoder2": Kind(
        gated=False, attention_bias="use_bias", mlp_bias="use_bias", default_bias=True, layer_norm=True, tied=True,
        key_value_heads=2, paths=(*_LLAMA[:4], "mlp.c_fc", "mlp.c_proj"),
    ),
}  # fmt: skip
"""Model types that the closed form counts; tests/models/test_counting.py compares each with what transformers builds."""


class Config:
    """Checked access to the keys of a config.json; what is wrong is collected in `problems`."""

    def __init__(self, content: dict[str, Any], name: str) -> None:
        self.content, self.name, self.problems = content, name, list[str]()
        self.kind = self._text("model_type") or "?"

    def size(self, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return a size; `default` where the key is missing or null. A key without default must be there."""
        value = self.content.get(key)
        if value is None:
            if default is None:
                self.problems.append(f"does not say {key}")
            return 1 if default is None else default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.problems.append(f"{key} is {shown(value)}, and no whole number from {least} to {most:,}")
            return least
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{key} is {shown(value)}, and neither true nor false")
        return bool(value)

    def table(self, key: str) -> dict[str, Any]:
        value = self.content.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.problems.append(f"{key} is {shown(value)}, and no object")
            return {}
        return value

    def indices(self, key: str) -> set[int]:
        value = self.content.get(key)
        if value is None:
            return set()
        if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
            self.problems.append(f"{key} is {shown(value)}, and no list of layers")
            return set()
        return set(value)

    def _text(self, key: str) -> str | None:
        value = self.content.get(key)
        if value is not None and not isinstance(value, str):
            self.problems.append(f"{key} is {shown(value)}, and no text")
            return None
        return value

    @property
    def dtype(self) -> str | None:
        return self._text("dtype") or self._text("torch_dtype")

    @property
    def quantized(self) -> str | None:
        """Return the quantization of the published weights."""
        section = self.table("quantization_config")
        method = section.get("quant_method")
        if section and not isinstance(method, str):
            self.problems.append(f"quantization_config.quant_method is {shown(method)}, and no text")
            return None
        return method

    def check(self) -> None:
        """Raise a RecipeError if something was wrong."""
        if self.problems:
            said = "; ".join(dict.fromkeys(self.problems))
            raise RecipeError(f"model.name_or_path: {self.name}: its config.json ({self.kind:.40}): {said}")


def shown(value: Any) -> str:
    """Return a value of a config.json for a message, shortened."""
    text = str(value) if not isinstance(value, int) or abs(value) < 10**40 else f"an integer of {value.bit_length()} bits"
    text = f"'{text}'" if isinstance(value, str) else text
    return text if len(text) <= 40 else f"{text[:40]}..."


def parse(content: bytes, where: str) -> dict[str, Any]:
    """Return a config.json's content.

    Raises:
        RecipeError: it is no JSON object in UTF-8, or of more than LARGEST bytes; with `where`.
    """
    try:
        config = json_core.load(content, LARGEST)
    except json_core.JSONError as error:
        raise RecipeError(f"model.name_or_path: {where}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise RecipeError(f"model.name_or_path: {where}: {shown(config)} is no object")
    return config


def read(path: Path) -> dict[str, Any]:
    """Return the content of a config.json; raises as `parse`, and if it cannot be read."""
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise RecipeError(f"model.name_or_path: {path}: {size:,} bytes, more than the {LARGEST:,} that are read")
        return parse(path.read_bytes(), str(path))
    except OSError as error:
        raise RecipeError(f"model.name_or_path: {path}: cannot be read: {error.strerror}") from None


def text_part(config: dict[str, Any], name: str) -> Config:
    """Return the part of a config.json that describes the decoder: text_config, if it has one.

    Raises:
        RecipeError: text_config is no object.
    """
    whole = Config(config, name)
    inner = whole.table("text_config")
    whole.check()
    return Config(inner, name) if inner else whole


def check_sizes(config: Config) -> None:
    """Check every key that may be a size, at all depths, before a library builds a model from them.

    Raises:
        RecipeError: one is negative or absurdly large, or there are more than MOST_LAYERS layers.
    """

    def look(table: dict[str, Any], at: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                look(value, f"{at}{key}.")
            numbers = value if isinstance(value, list) else [value]
            least, most = (1, MOST_LAYERS) if key in DEPTHS else (-MOST_LAYERS, MOST)
            for one in numbers:
                if (
                    isinstance(one, int | float)
                    and not isinstance(one, bool)
                    and _SIZE.search(key)
                    and not least <= one <= most
                ):
                    config.problems.append(f"{at}{key} is {shown(value)}, and no size from {least:,} to {most:,}")
                    break

    look(config.content, "")
    config.check()


def geometry(config: dict[str, Any], name: str, as_llama: bool = False) -> Geometry:
    """Return the sizes in a config.json of one of KINDS.

    Args:
        config: the content.
        name: what names the model in messages.
        as_llama: whether linear layers have Llama's seven names, and experts are modules, whatever transformers builds;
            litgpt, and transformers before 5, train them so.

    Raises:
        RecipeError: it lacks a size, has a wrong one, or is of another model type.
    """
    found = text_part(config, name)
    if found.kind not in KINDS:
        found.check()
        raise RecipeError(
            f"model.name_or_path: {name}: the sizes of a {found.kind:.40} do not follow from its config.json in closed form"
        )
    return _count(_with_llama_keys(found), KINDS[found.kind], Config(config, name).quantized, as_llama)


def _count(config: Config, kind: Kind, quantized: str | None, as_llama: bool) -> Geometry:
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers", most=MOST_LAYERS)
    heads, vocabulary = config.size("num_attention_heads"), config.size("vocab_size")
    dense_width = config.size("intermediate_size")
    key_value_heads = heads
    if config.content.get("num_key_value_heads", kind.key_value_heads) is not None:
        key_value_heads = config.size("num_key_value_heads", kind.key_value_heads)
    if heads % key_value_heads:
        config.problems.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {key_value_heads}")
    missing = kind.head_dim if "head_dim" not in config.content else None
    head = config.size("head_dim", missing or max(1, hidden // heads))
    if "head_dim" not in config.content and not missing and hidden % heads:
        config.problems.append(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is not there")
    query, key = heads * head, key_value_heads * head
    experts, chosen, width, dense_layers = 1, 1, dense_width, 0
    if kind.experts:
        name = "num_local_experts" if config.content.get("num_local_experts") is not None else "num_experts"
        experts, chosen = config.size(name, least=0), config.size("num_experts_per_tok")
        if config.kind != "mixtral":
            width = config.size("moe_intermediate_size")
            step, only = config.size("decoder_sparse_step", 1), config.indices("mlp_only_layers")
            dense_layers = sum(at in only or not experts or (at + 1) % step != 0 for at in range(layers))
        if experts and chosen > experts:
            config.problems.append(f"num_experts_per_tok {chosen} is more than {name} {experts}")
        if experts <= 1 or dense_layers == layers:
            config.problems.append(f"{name} is {experts}, and no number of experts to choose from")
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
    moe = layers - dense_layers
    share = chosen / experts
    stacked = experts > 1 and not as_llama
    linears = [
        Linear(name=_short(path), rows=rows, columns=columns, count=layers, path=f"{kind.layers}.*.{path}")
        for path, (rows, columns) in zip(paths[:at], attention, strict=True)
    ]
    for path, (rows, columns) in zip(paths[at:], mlp, strict=True):
        full = f"{kind.layers}.*.{path.replace('mlp.', 'mlp.experts.') if experts > 1 else path}"
        one = Linear(name=_short(path), rows=rows, columns=columns, count=moe * experts, path=full, share=share)
        linears.append(one.model_copy(update={"quantizable": not stacked, "adaptable": not stacked}))
        if dense_layers:
            rows, columns = (hidden, dense_width) if rows == hidden and columns == width else (dense_width, hidden)
            linears.append(
                Linear(name=one.name, rows=rows, columns=columns, count=dense_layers, path=f"{kind.layers}.*.{path}")
            )
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
        dense_layers=dense_layers,
        dense_intermediate_size=dense_width if dense_layers else 0,
        largest_layer=max(sizes) if dense_layers else None,
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
