"""Sizes of a model from the names and shapes of its parameters: as transformers builds them, or as its files
store them."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from training_estimates.config_json import DEPTHS, MOST_LAYERS, Config
from training_estimates.config_sizes import KINDS
from training_estimates.errors import LibrariesMissingError, SizesError
from training_estimates.meta_model import Built, Parameter
from training_estimates.sizes import Geometry, Linear, is_fused_name, joined


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it is stored."""

    dtype: str
    """Name in safetensors: BF16, F32, F8_E4M3, U8."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


MAY_DIFFER = 0.005
"""Largest difference between two counts of a model's parameters, as a share, that is not an error."""
CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "num_selected_experts",
)
"""Keys that name the experts a token passes."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_FIRST_NUMBER = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings?|shared)\.weight$"
)
_HEAD = re.compile(r"^(language_model\.|model\.)?(lm_head|embed_out|output|head)\.weight$")
_NO_LINEAR = re.compile(r"norm|embed|conv|router|rotary|(^|\.)ln_|(^|\.)(wte|wpe|gate)\.weight$|A_log|_bias$")
_ROUTER = re.compile(r"(^|\.)(router|gate|shared_expert_gate)(\.|$)")
# Tensors that older releases stored, and that transformers computes: rotations, causal masks.
_BUFFER = re.compile(
    r"(inv_freq|masked_bias|rope\.freqs|slope_rate|(query|key|diagonal)_decay|(attn|attention)\.bias)$"
)
_MATRICES = ("attn.bias", "attention.bias")
"""Names that are those of a vector too, a bias."""
_EXTRA_HEADS = re.compile(r"(^|\.)(mtp|mtp_block|nextn|eh_proj|mtp_layers|mtp_head)\b")
_EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Keys with the number of layers for further tokens, which are stored behind the decoder's."""
_TOWERS = re.compile(
    r"(^|\.)(visual|vision\w*|audio\w*|speech\w*|multi_modal_projector|mm_projector|embed_vision|embed_audio|image_newline|"
    r"talker|token2wav|code2wav)\."
)
# Scales and zeros of quantized weights.
_SCALES = re.compile(
    r"(weight_scale(_inv|_2)?|_scale_inv|_scales?|input_scale|activation_scale|weight_zero_point|zero_point|absmax|quant_map|"
    r"nested_absmax|nested_quant_map|quant_state\.\w+|SCB|weight_format|qzeros|g_idx|weight_shape)$"
)


def stored_total(
    tensors: Mapping[str, Tensor],
    config: Config,
    tied: bool,
    quantized: str | None,
    built: Built | None = None,
) -> tuple[int | None, str | None]:
    """Return the parameters of those tensors that transformers loads, and what it leaves out, in words.

    The total is None for a quantization whose packed shapes do not say how many weights they hold.
    """
    kept, left = loaded(tensors, config, tied, built)
    total = 0
    for name, tensor in kept.items():
        size = _weights_in(name, tensor, quantized, config)
        if size is None:
            return None, left
        total += size
    return total, left


def loaded(
    tensors: Mapping[str, Tensor], config: Config, tied: bool, built: Built | None = None
) -> tuple[dict[str, Tensor], str | None]:
    """Return the tensors that become parameters of the model, and what is left out, in words."""
    depth, extra = depth_of(config), sum(config.size(key, 0, least=0) for key in _EXTRA_LAYERS)
    patterns = [re.compile(pattern) for pattern in built.unloaded] if built else []
    has_no_tower = built and not any(_TOWERS.search(parameter.name) for parameter in built.parameters)
    has_embedding = any(map(_EMBEDDING.search, tensors))
    kept, left = {}, {}
    for name, tensor in tensors.items():
        if _BUFFER.search(name) and (not name.endswith(_MATRICES) or len(tensor.shape) > 1):
            continue
        if built and name.rpartition(".")[2] in built.buffers:
            continue
        if tied and has_embedding and _HEAD.search(name):
            continue
        layer, tower = _LAYER.search(name), _TOWERS.search(name)
        is_extra_layer = depth and layer and not tower and depth <= int(layer[1]) < depth + extra
        is_unloaded = _EXTRA_HEADS.search(name) or any(pattern.search(name) for pattern in patterns)
        if is_extra_layer or is_unloaded or (has_no_tower and tower):
            left[name] = tensor
        else:
            kept[name] = tensor
    if not left:
        return kept, None
    size = sum(tensor.size for tensor in left.values())
    return (
        kept,
        f"{_counted(len(left), 'stored tensor')} of {_counted(size, 'parameter')} that transformers does not "
        f"load ({min(left)} ...)",
    )


def depth_of(config: Config) -> int:
    """Return the number of decoder layers in a config.json; 0 where it does not say."""
    for key in DEPTHS:
        if isinstance(config.content.get(key), int):
            return config.size(key, most=MOST_LAYERS)
    return 0


def _weights_in(name: str, tensor: Tensor, quantized: str | None, config: Config) -> int | None:
    """Return the number of weights that a stored tensor holds."""
    if quantized is None or (tensor.dtype in ("BF16", "F16", "F32") and not _SCALES.search(name)):
        return tensor.size
    if _SCALES.search(name):
        return 0
    section = config.content.get("quantization_config") or {}
    if quantized in ("fp8", "fbgemm_fp8") or tensor.dtype.startswith("F8"):
        return tensor.size
    if quantized == "bitsandbytes":
        return tensor.size * (2 if tensor.dtype == "U8" else 1)
    if quantized == "mxfp4" and name.endswith("_blocks"):
        return tensor.size * 2
    bits = section.get("bits")
    if quantized in ("gptq", "awq") and name.endswith("qweight") and isinstance(bits, int) and bits > 0:
        return tensor.size * 32 // bits
    return None


def compare(name: str, first: tuple[str, int], second: tuple[str, int]) -> None:
    """Raise a SizesError if two counts of a model's parameters, each with its source, differ by more than
    MAY_DIFFER."""
    (source, count), (other, other_count) = first, second
    if abs(count - other_count) > MAY_DIFFER * max(count, other_count, 1):
        raise SizesError(
            f"{name}: its parameters are {count:,} by {source}, and {other_count:,} by {other}: config.json "
            "and weights are not of the same model, or this model type is miscounted; neither is relied on"
        )


def of_built(built: Built, config: Config, quantized: str | None) -> Geometry:
    """Return the sizes of a model that transformers has built."""
    merged = Config({"model_type": config.kind} | built.config, config.name)
    tied = built.head is None or built.head == built.embedding
    shapes = {parameter.name: parameter.shape for parameter in built.parameters}
    table = shapes.get(built.embedding or "", ())
    tables = {built.embedding, built.head}
    sizes = _of(built.parameters, tables - {None}, table, tied, merged)
    outside = sum(
        math.prod(parameter.shape)
        for parameter in built.parameters
        if built.decoder
        and not parameter.name.startswith(f"{built.decoder}.")
        and parameter.name not in tables
    )
    return sizes.model_copy(
        update={
            "model_type": config.kind,
            "dtype": config.dtype,
            "quantized": quantized,
            "counted": "transformers' own code",
            "decoder": built.decoder,
            "outside": outside,
            "embedding": built.tables[0],
            "head": built.tables[1],
        }
    )


def of_headers(tensors: Mapping[str, Tensor], config: Config, quantized: str | None) -> Geometry:
    """Return the sizes of a model from its files alone.

    Raises:
        SizesError: its files do not have the layers, experts or vocabulary of its config.json, or they are
            quantized.
    """
    if quantized not in (None, "fp8", "fbgemm_fp8"):
        raise LibrariesMissingError(
            f"{config.name}: {quantized} weights are packed, and without torch and transformers not counted; "
            f"{ADVICE}"
        )
    flag = config.flag("tie_word_embeddings", False)
    kept, left = loaded(tensors, config, flag)
    if quantized:
        kept = {name: tensor for name, tensor in kept.items() if not _SCALES.search(name)}
    embeddings = [name for name in kept if _EMBEDDING.search(name) and len(kept[name].shape) == 2]
    towers = [name for name in kept if _TOWERS.search(name)]
    if len(embeddings) != 1 or towers or config.table("text_config"):
        why = (
            f"what transformers loads of {towers[0]} is not known"
            if towers
            else f"it has {_counted(len(embeddings), 'table')} of embeddings"
        )
        raise LibrariesMissingError(f"{config.name}: {why} without torch and transformers; {ADVICE}")
    table = kept[embeddings[0]].shape
    head = next((name for name in kept if _HEAD.search(name)), None)
    _check_layers(kept, config)
    for key, width in (("vocab_size", table[0]), ("hidden_size", table[1])):
        if (listed := config.size(key, width)) != width:
            raise SizesError(
                f"{config.name}: {key} is {listed:,} in its config.json, and {width:,} in {embeddings[0]}"
            )
    config.check()
    parameters = [
        Parameter(name, kept_tensor.shape, _guessed_kind(name, kept_tensor.shape))
        for name, kept_tensor in kept.items()
    ]
    sizes = _of(parameters, {embeddings[0], head} - {None}, table, head is None, config)
    return sizes.model_copy(
        update={
            "dtype": config.dtype,
            "quantized": quantized,
            "counted": "safetensors headers",
            "left_out": left,
            "embedding": embeddings[0].rpartition(".")[0],
            "head": head.rpartition(".")[0] if head else "lm_head",
        }
    )


ADVICE = "count it where torch and transformers are installed"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def _guessed_kind(name: str, shape: tuple[int, ...]) -> str:
    is_linear = (
        len(shape) == 2 and min(shape) > 1 and name.endswith(".weight") and not _NO_LINEAR.search(name)
    )
    return "linear" if is_linear else "other"


def _check_layers(kept: Iterable[str], config: Config) -> None:
    depth = depth_of(config)
    stored = {int(match[1]) for name in kept if (match := _LAYER.search(name))}
    if not depth or stored != set(range(depth)):
        layers = _counted(depth, "layer") if depth else "no number of layers"
        raise SizesError(f"{config.name}: its config.json has {layers}, and its files have {len(stored)}")
    experts = {int(match[1]) for name in kept if (match := _EXPERT.search(name))}
    numbers = [
        config.content.get(key)
        for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    ]
    named = next((number for number in numbers if isinstance(number, int) and number > 1), len(experts))
    if experts and named != len(experts):
        raise SizesError(
            f"{config.name}: its config.json has {_counted(named, 'expert')}, and its files {len(experts)}"
        )


def _of(
    parameters: list[Parameter], tables: set[str | None], table: tuple[int, ...], tied: bool, config: Config
) -> Geometry:
    experts = _experts(parameters)
    chosen = next(
        (config.size(key) for key in CHOSEN if isinstance(config.content.get(key), int)), experts or 1
    )
    share = min(1.0, chosen / experts) if experts else 1.0
    linears, by_layer, total = [], defaultdict[int, int](int), 0
    shared = dense = routed = 0
    moe_layers: set[str] = set()
    for parameter in parameters:
        size = math.prod(parameter.shape)
        total += size
        if parameter.name in tables or not (linear := _linear(parameter, share)):
            continue
        linears.append(linear)
        layer = _LAYER.search(parameter.name)
        by_layer[int(layer[1]) if layer else -1] += size
        if layer and "experts" in parameter.name and "shared" not in parameter.name:
            moe_layers.add(layer[1])
    layers = depth_of(config) or max(by_layer, default=0) + 1 or 1
    hidden = config.size("hidden_size", table[1] if len(table) > 1 else 1)
    vocabulary = table[0] if table else 1
    linears = joined(linears)
    known = sum(linear.parameters for linear in linears) + vocabulary * hidden * (1 if tied else 2)
    heads = config.size("num_attention_heads", 1)
    routed, shared, dense = _widths(linears, hidden, config)
    return Geometry(
        model_type=config.kind,
        dtype=config.dtype,
        hidden_size=hidden,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        linears=linears,
        tie_word_embeddings=tied,
        extra=total - known,
        num_attention_heads=heads,
        num_key_value_heads=_or(config, "num_key_value_heads", heads),
        head_dim=_or(config, "head_dim", max(1, hidden // heads)),
        intermediate_size=routed or _or(config, "intermediate_size", 4 * hidden),
        gated=any(linear.name in ("gate", "gate_up", "w3") for linear in linears),
        experts=experts or 1,
        experts_per_token=chosen if experts else 1,
        shared_intermediate_size=shared,
        dense_layers=max(0, layers - len(moe_layers)) if experts else 0,
        dense_intermediate_size=dense if experts else 0,
        largest_layer=max(by_layer.values(), default=0),
        unsupported=why_unsupported(config, parameters),
    )


def _or(config: Config, key: str, otherwise: int) -> int:
    value = config.content.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise


def _widths(linears: list[Linear], hidden: int, config: Config) -> tuple[int, int, int]:
    """Return the widths of a routed expert, of the shared experts, and of the MLP of a dense layer; 0 where
    there is none."""

    def width(part: str, not_part: str = " ") -> int:
        widths = [
            linear.rows
            for linear in linears
            if linear.name in ("down", "w2") and part in linear.path and not_part not in linear.path
        ]
        return max(widths, default=0)

    of_experts = [
        linear for linear in linears if not linear.adaptable and not linear.path.endswith(".weight")
    ]
    stacked = [
        min(expert.rows, expert.columns) if expert.rows != hidden else expert.columns for expert in of_experts
    ]
    routed = width(".experts.") or (stacked[-1] if stacked else 0)
    return routed, width("shared"), width("mlp.", "expert")


def _experts(parameters: list[Parameter]) -> int:
    """Return the number of routed experts of a layer; 0 where there are none."""
    single = {int(match[1]) for parameter in parameters if (match := _EXPERT.search(parameter.name))}
    stacked = [parameter.shape[0] for parameter in parameters if _is_stacked(parameter)]
    return max([len(single), *stacked], default=0)


def _is_stacked(parameter: Parameter) -> bool:
    return len(parameter.shape) == 3 and ("expert" in parameter.name or is_fused_name(parameter.name))


def _linear(parameter: Parameter, share: float) -> Linear | None:
    path = re.sub(r"\.\d+\.", ".*.", parameter.name).removesuffix(".weight")
    name = path.rpartition(".")[2].removesuffix("_proj")
    if _is_stacked(parameter):
        count, columns, rows = parameter.shape
        fields, layer = (
            {"quantizable": False, "adaptable": False, "share": share},
            _FIRST_NUMBER.search(parameter.name),
        )
        layers = (int(layer[1]),) if layer else ()
        # As a recipe names it (rank_pattern), and PEFT: with `.weight` where the parameter is one of a layer.
        path += ".weight" * (parameter.name.endswith(".weight") and is_fused_name(parameter.name))
        return Linear.model_validate(
            fields
            | {"name": name, "rows": rows, "columns": columns, "count": count, "path": path, "layers": layers}
        )
    if parameter.kind not in ("linear", "subclass", "conv1d") or len(parameter.shape) != 2:
        return None
    rows, columns = parameter.shape if parameter.kind == "conv1d" else reversed(parameter.shape)
    routed = bool(_EXPERT.search(parameter.name))
    places = [
        match[1] for name in (parameter.name, *parameter.shared) if (match := _FIRST_NUMBER.search(name))
    ]
    return Linear(
        name=name,
        rows=rows,
        columns=columns,
        count=1,
        path=path,
        share=share if routed else 1.0,
        quantizable=parameter.kind != "subclass",
        adaptable=not _ROUTER.search(path),
        layers=tuple(sorted({int(place) for place in places})),
        modules=1 + len(parameter.shared) if parameter.shared else 0,
    )


VERIFIED = frozenset({*KINDS, "ernie4_5_moe", "glm4_moe", "mpt", "qwen2_moe"})
"""Model types of which the closed form of activations and time is shown to hold: by published runs, or by the
dry run, whose memory differs from it no more than Llama's (docs/plan.md, "Counted models")."""


def why_unsupported(config: Config, parameters: list[Parameter]) -> str | None:
    """Return what the closed form of activations and time does not know about a model; None where it
    holds."""
    kinds = config.content.get("layer_types") or config.content.get("layers_block_type") or []
    named = (
        sorted({str(kind) for kind in kinds if "attention" not in str(kind) or "linear" in str(kind)})
        if isinstance(kinds, list)
        else []
    )
    names = [parameter.name for parameter in parameters]
    if any("kv_b_proj" in name or "kv_a_proj" in name for name in names):
        return f"multi-head latent attention ({config.kind})"
    if named or any(re.search(r"A_log|conv1d|mixer\.D$|time_decay", name) for name in names):
        return f"layers that are not attention ({', '.join(named) or 'recurrent'}; {config.kind})"
    if any(_TOWERS.search(name) for name in names):
        return f"parts for images or sound ({config.kind})"
    if config.kind in VERIFIED:
        return None
    return f"the tensors that layers of {config.kind} keep for backward"
