"""A model as transformers builds it on the meta device: sizes without memory, for types that the closed form
does not count."""

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from training_estimates.config_json import shown
from training_estimates.errors import SizesError

_UNREAD = ("quantization_config", "auto_map", "transformers_version", "architectures")
"""Keys that decide how weights are loaded, not how large they are."""
_WITHOUT_POOLER: Mapping[str, Any] = MappingProxyType({"add_pooling_layer": False})
ENCODERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bert": _WITHOUT_POOLER,
        "camembert": _WITHOUT_POOLER,
        "deberta-v2": MappingProxyType({}),
        "distilbert": MappingProxyType({}),
        "electra": MappingProxyType({}),
        "modernbert": MappingProxyType({}),
        "mpnet": _WITHOUT_POOLER,
        "roberta": _WITHOUT_POOLER,
        "xlm-roberta": _WITHOUT_POOLER,
    }
)
"""Encoders that are built without a head, with arguments for AutoModel: the pooler of BERT's kind is a layer
behind the last hidden state that embedding models leave out."""
_AFTER_HIDDEN_STATES = (
    r"(^|\.)pooler\.",
    r"^(cls|lm_head|head|decoder|(generator|discriminator|vocab)_[a-z_]+)\.",
)
"""Patterns of an encoder's stored tensors that are not built: pooler, and head of masked or replaced
words."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a model, tied ones once."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """linear (nn.Linear), subclass (of it), conv1d (transformers' own, of GPT-2: rows are inputs), or
    other."""
    shared: tuple[str, ...] = ()
    """Further names of the parameter, in other modules."""


@dataclass(frozen=True, slots=True)
class Built:
    """A model that transformers has built from a config.json."""

    parameters: list[Parameter]
    embedding: str | None
    """Name of the input embedding's weight."""
    head: str | None
    """Name of the head's weight, also where it is tied."""
    tables: tuple[str, str]
    """Names of the modules of the input embedding and of the head; empty where there is none."""
    decoder: str | None
    """Name of the text decoder in a model of several parts; None if there is one part."""
    config: dict[str, Any]
    """The decoder's configuration with transformers' defaults."""
    buffers: set[str]
    """Last parts of the names of buffers, which files may store and which are not parameters."""
    unloaded: list[str]
    """Patterns of stored tensors that transformers leaves out."""

    @property
    def total(self) -> int:
        return sum(math.prod(parameter.shape) for parameter in self.parameters)


def is_installed() -> bool:
    """Return whether torch and transformers are installed."""
    return find_spec("torch") is not None and find_spec("transformers") is not None


def loader_of(model_type: str) -> Any:
    """Return the class of transformers that loads language models of a type, which may read images, or an
    encoder; None for types of other models."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if model_type in ENCODERS:
        return AutoModel
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else None


def build(config: dict[str, Any], name: str) -> Built:
    """Return the model of a config.json, whose sizes are checked already; code of the model's own is never
    run.

    Raises:
        SizesError: transformers does not have its type as a causal language model, or refuses the config.
    """
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    loader = loader_of(kind) if isinstance(kind, str) else None
    if not isinstance(kind, str) or loader is None:
        raise SizesError(
            f"{name}: transformers {transformers.__version__} builds no causal language model of the type "
            f"{shown(kind)} that its config.json names"
        )
    content = {key: _floats(value) for key, value in config.items() if key not in _UNREAD}
    try:
        with _quiet(), torch.device("meta"):
            model = loader.from_config(
                CONFIG_MAPPING[kind].from_dict(content), trust_remote_code=False, **ENCODERS.get(kind, {})
            )
            return _describe(model, _AFTER_HIDDEN_STATES if kind in ENCODERS else ())
    except Exception as error:  # noqa: BLE001 (a config from outside fails anywhere in the model's code)
        reason = " ".join(str(error).split())
        raise SizesError(
            f"{name}: transformers builds no causal language model from its config.json ({kind}): "
            f"{type(error).__name__}: {reason:.200}"
        ) from None


def _floats(value: Any) -> Any:
    """Return a value with infinities as numbers, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return (
                float(value["__float__"]) if value["__float__"] in ("Infinity", "-Infinity", "NaN") else value
            )
        return {key: _floats(item) for key, item in value.items()}
    return [_floats(item) for item in value] if isinstance(value, list) else value


def _describe(model: Any, left_out: tuple[str, ...]) -> Built:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    kinds: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            kinds[f"{path}.weight"] = "linear" if type(module) is nn.Linear else "subclass"
        elif isinstance(module, Conv1D):
            kinds[f"{path}.weight"] = "conv1d"
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    further: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first := names[id(parameter)]) != name:
            further.setdefault(first, []).append(name)

    def weight(module: Any) -> str | None:
        return names.get(id(getattr(module, "weight", None)))

    def path_of(module: Any) -> str:
        return next((path for path, child in model.named_modules() if child is module), "")

    decoder = model.config.get_text_config(decoder=True)
    return Built(
        [
            Parameter(name, tuple(child.shape), kinds.get(name, "other"), tuple(further.get(name, ())))
            for name, child in model.named_parameters()
        ],
        weight(model.get_input_embeddings()),
        weight(model.get_output_embeddings()),
        (path_of(model.get_input_embeddings()), path_of(model.get_output_embeddings())),
        decoder_of(model),
        decoder.to_dict() | _own(decoder),
        {name.rpartition(".")[2] for name, _ in model.named_buffers()}
        - {name.rpartition(".")[2] for name in names.values()},
        [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []), *left_out],
    )


_ASKED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)
"""Sizes that many configurations have under another name (GPT-2's n_embd)."""


def _own(config: Any) -> dict[str, int]:
    """Return those of _ASKED that a configuration has; of sizes that differ from layer to layer it has
    none."""
    known = {}
    for key in _ASKED:
        try:
            value = getattr(config, key, None)
        except Exception:  # noqa: BLE001 (AmbiguousGlobalPerLayerAttributeError, which is not public)
            continue
        if isinstance(value, int):
            known[key] = value
    return known


def decoder_of(model: Any) -> str | None:
    """Return the name of the text decoder in a model of several parts; None if there is one part."""
    if model.config.get_text_config() is model.config:
        return None
    decoder = model.get_decoder()
    return next((name for name, layer in model.named_modules() if layer is decoder and name), None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from logging about generation settings, kernels and the like."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
