"""Positions of a base model: the longest sequence that it can read, or that it was made for."""

from typing import Any, NamedTuple

from flytune.models.config_json import text_part

_ROBERTA = (
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
BOUND = {
    **dict.fromkeys(("codegen", "gptj"), ("n_positions", 2048)),
    **dict.fromkeys(("gpt-sw3", "gpt2", "gpt_bigcode"), ("n_positions", 1024)),
    "ctrl": ("n_positions", 256),
    "openai-gpt": ("n_positions", 512),
    "mpt": ("max_seq_len", 2048),
    "whisper": ("max_target_positions", 448),
    **dict.fromkeys(
        ("bart", "biogpt", "marian", "mbart", "mvp", "pegasus", "plbart"), ("max_position_embeddings", 1024)
    ),
    **dict.fromkeys(("big_bird", "bigbird_pegasus"), ("max_position_embeddings", 4096)),
    "blenderbot": ("max_position_embeddings", 128),
    **dict.fromkeys(("gpt_neo", "opt"), ("max_position_embeddings", 2048)),
    "roformer": ("max_position_embeddings", 1536),
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "blenderbot-small",
            "deberta-v2",
            "distilbert",
            "electra",
            "ernie",
            "megatron-bert",
            "mpnet",
            "prophetnet",
            "rembert",
            "roc_bert",
            "trocr",
            "xlm",
            *_ROBERTA,
        ),
        ("max_position_embeddings", 512),
    ),
}
"""Model types that fail on a longer sequence (they have a table with a row for each position), with the key
of config.json that says how many there are and its default. tests/models/test_positions.py runs one of every
type."""
_BEFORE_FIRST = dict.fromkeys(_ROBERTA, 1) | {"prophetnet": 2}
"""Rows that no token gets, beside those up to pad_token_id."""
_STRETCHED = ("linear", "dynamic", "yarn", "ntk")
"""Kinds of RoPE scaling by which a base reads `factor` times the positions; the others' are
max_position_embeddings already."""


class Positions(NamedTuple):
    """Number of tokens of a sequence."""

    tokens: int
    is_bound: bool
    """True if a longer sequence is an error; False if it is one that the base was not made for."""


def of(config: dict[str, Any], name: str, trust_remote_code: bool = False) -> Positions | None:
    """Return the positions of the decoder in a config.json; None where it does not limit them, or does not
    say."""
    part = text_part(config, name)
    content, kind = part.content, part.kind
    # DeBERTa's table is there only where config.json does not say that distances alone count.
    has_table = kind in BOUND and not (kind == "deberta-v2" and content.get("position_biased_input") is False)
    if has_table and not trust_remote_code:
        key, default = BOUND[kind]
        count = _number(content, key) or _number(content, "max_position_embeddings") or default
        if kind == "mpnet":
            # Positions begin behind its padding, which is token 1 whatever config.json says.
            count -= 2
        elif kind in _BEFORE_FIRST:
            pad = content.get("pad_token_id", 0 if kind == "prophetnet" else 1)
            count -= _BEFORE_FIRST[kind] + (pad if type(pad) is int and 0 <= pad < count else 0)
        return Positions(max(1, count), is_bound=True)
    made_for = _number(content, "max_position_embeddings")
    if content.get("alibi") is True or made_for is None:
        return None
    return Positions(max(made_for, _stretched(content, made_for)), is_bound=False)


def scaling_of(content: dict[str, Any]) -> str | None:
    """Return the type of scaling of the rotary embedding in a config.json; None if there is none."""
    for part in (content.get("rope_parameters"), content.get("rope_scaling")):
        kind = part.get("rope_type", part.get("type")) if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "default":
            return kind
    return None


def of_model(model: Any) -> Positions | None:
    """Return the positions of a loaded model."""
    return of(model.config.to_dict(), type(model).__name__)


def _stretched(content: dict[str, Any], count: int) -> int:
    for key in ("rope_parameters", "rope_scaling"):
        scaling = content.get(key)
        if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) not in _STRETCHED:
            continue
        factor = scaling.get("factor")
        if isinstance(factor, int | float) and 1 <= factor <= 10_000:
            return int((_number(scaling, "original_max_position_embeddings") or count) * factor)
    return 0


def _number(content: dict[str, Any], key: str) -> int | None:
    value = content.get(key)
    return value if type(value) is int and 0 < value <= 10**9 else None
