"""Sizes of a model: from its config.json, from the headers of its files, or as transformers builds it.

A plan pod and a laptop have no torch: config.json alone is enough for Llama's layout, and headers for others;
transformers' own code is exact for all that it knows. Where two of them are at hand, they must agree.
"""

from typing import Any

from training_estimates import config_json, meta_model, tensor_counts, towers
from training_estimates.config_json import Config
from training_estimates.config_sizes import KINDS, geometry
from training_estimates.errors import LibrariesMissingError, SizesError
from training_estimates.sizes import Geometry
from training_estimates.tensor_counts import Tensor


def count(
    config: dict[str, Any], tensors: dict[str, Tensor] | None = None, name: str = "config.json"
) -> Geometry:
    """Return the sizes of a model from its config.json and the tensors in its files, where these are at hand.

    Raises:
        SizesError: config.json has no or wrong sizes, it and the weights disagree, or the model's type cannot
            be counted here.
    """
    text, quantized = config_json.text_part(config, name), Config(config, name).quantized
    if tensors is not None and not tensors:
        raise SizesError(f"{name}: its safetensors hold no tensor")
    kind = KINDS.get(text.kind)
    if kind is not None and text.content is config:
        sizes, built = geometry(config, name), None
    else:
        config_json.check_sizes(Config(config, name))
        built = _built(config, name, tensors is not None)
        if built is None:
            assert tensors is not None
            return tensor_counts.of_headers(tensors, text, quantized)
        sizes = tensor_counts.of_built(built, text, quantized)
    sizes = sizes.model_copy(
        update={
            "dtype": sizes.dtype or Config(config, name).dtype,
            "tower": towers.of_config(config, name),
        }
    )
    if tensors is None:
        return sizes
    total, left = tensor_counts.stored_total(
        tensors, Config(config, name), sizes.tie_word_embeddings, quantized, built
    )
    if total is not None:
        tensor_counts.compare(name, ("the headers of its files", total), (sizes.counted, sizes.parameters))
    return sizes.model_copy(update={"left_out": left})


def _built(config: dict[str, Any], name: str, otherwise: bool) -> meta_model.Built | None:
    """Return the model that transformers builds; None where it cannot, if there are headers to count
    `otherwise`."""
    kind = config.get("model_type")
    if not meta_model.is_installed():
        if otherwise:
            return None
        raise LibrariesMissingError(
            f"{name}: the sizes of a {config_json.shown(kind)} do not follow from its config.json in "
            "closed form, and its safetensors are not at hand; name a folder or repository that has them, or "
            f"{tensor_counts.ADVICE}"
        )
    try:
        return meta_model.build(config, name)
    except SizesError:
        if otherwise:
            return None
        raise
