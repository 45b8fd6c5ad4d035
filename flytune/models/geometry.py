"""A base model as its config.json describes it: sizes for the planner, read without torch and without the weights."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from flytune.errors import RecipeError
from flytune.models import base, vocabulary
from flytune.recipe import Model
from flytune.schema import Strict

# Model types whose MLP has two matrices (up, down) instead of Llama's three (gate, up, down).
_UNGATED = {"gpt_neox", "phi", "starcoder2", "mpt"}
# Model types whose linear layers all have biases; those where queries, keys and values alone have them; tied by default.
_BIASED = {"gpt_neox", "phi", "starcoder2"}
_BIASED_QKV = {"qwen", "qwen2"}
_TIED = {"gemma", "gemma2", "gemma3_text", "mpt"}
# Norms of hidden size in one decoder layer, and vectors in one norm (a layer norm has a bias), where they are not 2 and 1.
_NORMS = {"phi": 1, "gemma2": 4, "gemma3_text": 4}
_LAYER_NORMS = {"gpt_neox", "phi", "starcoder2"}

_SHIPPED_FILE = Path(__file__).resolve().parent / "base_models.json"


class Geometry(Strict):
    """Sizes of a decoder in Llama's layout; counts are parameters."""

    model_type: str
    dtype: str | None
    """Dtype of the published weights."""
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    linears: list[tuple[int, int]]
    """(in, out) of each linear layer of one decoder layer: attention and MLP, every expert, no router."""
    tie_word_embeddings: bool
    quantized: str | None = None
    """Quantization of the published weights (bitsandbytes, gptq ...); None if they are not quantized."""
    extra: int
    """Norms, biases, routers and learned positions of all layers, and the last norm."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    """Width of one MLP, of one expert."""
    gated: bool
    """True if the MLP has three matrices (gate, up, down), False for two."""
    experts: int = 1
    experts_per_token: int = 1

    @property
    def named_linears(self) -> list[tuple[str, int, int]]:
        """Return `linears` with the names q, k, v, o, gate, up, down; those of the MLP repeat for each expert."""
        mlp = ["gate", "up", "down"] if self.gated else ["up", "down"]
        names = ["q", "k", "v", "o", *mlp * self.experts]
        return [(name, rows, columns) for name, (rows, columns) in zip(names, self.linears, strict=True)]

    @property
    def linear_parameters(self) -> int:
        """Return the parameters of the linear layers of all decoder layers, which NF4 quantizes."""
        return self.num_hidden_layers * sum(rows * columns for rows, columns in self.linears)

    @property
    def embedding_parameters(self) -> int:
        """Return the parameters of the input embedding, and of the head if it is not tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def parameters(self) -> int:
        return self.linear_parameters + self.embedding_parameters + self.extra


def read_geometry(model: Model) -> Geometry:
    """Return the sizes of a base model with the recipe's added tokens, from base_models.json or config.json.

    The config.json is that of the model's folder or of the hub. The tokenizer is not read: embedding and head may have less
    rows, where some of the tokens exist already or padding has room for them.

    Raises:
        RecipeError: the folder or the file does not exist, the hub cannot be reached, the repository is gated and no token
            is set, or the config is not one of a decoder in Llama's layout.
    """
    found = _read(model)
    rows = found.vocab_size + len(model.extra_special_tokens)
    return found.model_copy(update={"vocab_size": vocabulary.rows_for(found.vocab_size, rows)})


def _read(model: Model) -> Geometry:
    if shipped := shipped_config(model):
        return geometry(shipped, model.name_or_path)
    path = config_file(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecipeError(f"model.name_or_path: {path}: not JSON: {error}") from None
    return geometry(config, model.name_or_path)


def table_rows(model: Model) -> int | None:
    """Return the rows of the embedding that config.json describes; None where it grows with added tokens, or is unknown."""
    if model.extra_special_tokens:
        return None
    try:
        config = shipped_config(model) or json.loads(config_file(model).read_text(encoding="utf-8"))
    except (RecipeError, OSError, ValueError):
        return None  # a folder of a tokenizer alone
    rows = (config.get("text_config") or config).get("vocab_size")
    return rows if isinstance(rows, int) else None


def shipped_config(model: Model) -> dict[str, Any] | None:
    """Return base_models.json's part of the model's config.json at that revision; None if the model's own is read.

    A folder of this machine is read. For another revision, or none, the hub is asked, as it may have another model.
    """
    entry = shipped().get(model.name_or_path)
    if entry is None or entry["revision"] != model.revision or not base.is_on_hub(model):
        return None
    config: dict[str, Any] = entry["config"]
    return config


@cache
def shipped() -> dict[str, Any]:
    """Return the base models of shipped recipes: `revision`, `source`, and the part of config.json that sizes need."""
    entries: dict[str, Any] = json.loads(_SHIPPED_FILE.read_text(encoding="utf-8"))
    return entries


def config_file(model: Model) -> Path:
    """Return the local path of the model's config.json; it is fetched from the hub or its address if necessary.

    Raises:
        RecipeError: there is none, or it cannot be read.
    """
    where = f"model.name_or_path: {model.name_or_path}"
    name = base.local_name(model, weights=False)
    if (folder := Path(name)).is_dir():
        if not (folder / "config.json").is_file():
            found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
            raise RecipeError(f"{where}: the folder has no config.json; it holds {found}")
        return folder / "config.json"

    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", revision=model.revision, local_files_only=not base.hub_answers()))
    except Exception as error:  # noqa: BLE001 (the hub's errors are OSErrors; those of a proxy are not)
        raise base.refused(error, where, _how_to_plan(model)) from None


def _how_to_plan(model: Model) -> str:
    """Return advice on planning when the hub cannot be asked for the sizes of a model."""
    from huggingface_hub import constants

    entry = shipped().get(model.name_or_path)
    pin = f"write model.revision: {entry['revision']}, whose sizes Flytune has; or " if entry else ""
    offline = (
        "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "set HF_HUB_OFFLINE=1 where this machine's cache has the model"
    )
    return f"{pin}name a folder that holds the model's config.json (it is enough for a plan), or {offline}"


def geometry(config: dict[str, Any], name: str) -> Geometry:
    """Return the sizes in a config.json.

    Raises:
        RecipeError: it lacks one of them.
    """
    quantized = (config.get("quantization_config") or {}).get("quant_method")
    config = _with_llama_keys(config.get("text_config") or config)
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if missing := [key for key in needed if not isinstance(config.get(key), int)]:
        raise RecipeError(
            f"model.name_or_path: {name}: its config.json ({config.get('model_type', 'no model_type')}) does not say "
            f"{', '.join(missing)}; Flytune plans decoder models in Llama's layout"
        )
    kind = config.get("model_type") or "?"
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    key_value_heads = config.get("num_key_value_heads") or heads
    key_value = key_value_heads * head
    attention = [(hidden, heads * head), (hidden, key_value), (hidden, key_value), (heads * head, hidden)]
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    gated = kind not in _UNGATED
    linears = attention + ([(hidden, width)] * (2 if gated else 1) + [(width, hidden)]) * experts
    tied = bool(config.get("tie_word_embeddings", kind in _TIED))
    vectors = 2 if kind in _LAYER_NORMS else 1
    # Qwen 3 normalizes queries and keys, with a weight for each channel of a head.
    norms = _NORMS.get(kind, 2) * vectors * hidden + (2 * head if kind.startswith("qwen3") else 0)
    biases = 0
    if kind in _BIASED:
        biases = sum(columns for _, columns in linears)
    elif config.get("attention_bias") or kind in _BIASED_QKV:
        biases = heads * head + 2 * key_value
    router = hidden * experts if experts > 1 else 0
    # Phi's head has a bias as well.
    once = vectors * hidden + config.get("learned_positions", 0) * hidden + (config["vocab_size"] if kind == "phi" else 0)
    return Geometry(
        model_type=kind,
        dtype=config.get("dtype") or config.get("torch_dtype"),
        hidden_size=hidden,
        num_hidden_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        linears=linears,
        quantized=quantized,
        tie_word_embeddings=tied,
        extra=config["num_hidden_layers"] * (norms + biases + router) + once,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head,
        intermediate_size=width,
        gated=gated,
        experts=experts,
        experts_per_token=(config.get("num_experts_per_tok") or 1) if experts > 1 else 1,
    )


def _with_llama_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with Llama's keys, if its model type has other keys for the same sizes."""
    if config.get("model_type") == "mpt" and isinstance(config.get("d_model"), int):
        alibi = (config.get("attn_config") or {}).get("alibi")
        return config | {
            "hidden_size": config["d_model"],
            "num_hidden_layers": config.get("n_layers"),
            "num_attention_heads": config.get("n_heads"),
            "intermediate_size": config["d_model"] * config.get("expansion_ratio", 4),
            # Positions are a table of vectors, unless they are slopes added to the scores.
            "learned_positions": 0 if alibi else config.get("max_seq_len", 2048),
        }
    if config.get("model_type") == "qwen" and isinstance(config.get("intermediate_size"), int):
        # The first Qwen counts gate and up together.
        return config | {"intermediate_size": config["intermediate_size"] // 2}
    return config
