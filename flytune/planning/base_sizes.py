"""Sizes of a recipe's base model."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from flytune import process_setup
from flytune.errors import RecipeError
from flytune.models import base, config_json, model_types, positions, rope, tensor_headers, vocabulary
from flytune.models.config_json import config_file, known_config, shipped_config
from flytune.recipe import Model
from training_estimates import config_sizes, counting
from training_estimates.sizes import Geometry
from training_estimates.tensor_counts import Tensor

log = logging.getLogger(__name__)


def read_geometry(model: Model) -> Geometry:
    """Return the sizes of a base model with the recipe's added tokens.

    They are those of base_models.json, or of the model's folder, address or repository on the hub
    (docs/plan.md, "Counted models"). The tokenizer is not read: embedding and head may have less rows, where
    some of the tokens exist already or padding has room for them.

    Raises:
        RecipeError: the folder or the file does not exist, the hub cannot be reached, the repository is gated
            and no token is set, config.json has no or wrong sizes, it and the weights disagree, or the
            model's type cannot be counted here.
    """
    return _with_added_tokens(_read(model), model)


def layer_counter(model: Model) -> Callable[[int], Geometry]:
    """Return a function that counts a model with another number of layers, from its config.json in closed
    form.

    Raises:
        RecipeError: the file cannot be read, or sizes of its type do not follow from it.
    """
    config = shipped_config(model) or known_config(model) or config_json.read(config_file(model))
    inner = config_json.text_part(config, model.name_or_path).content
    key = "n_layers" if "n_layers" in inner else "num_hidden_layers"

    def counted(layers: int) -> Geometry:
        of_layers = geometry({**inner, key: layers}, model.name_or_path)
        return _with_added_tokens(_with_loss(of_layers, config, model), model)

    counted(1)
    return counted


def _read(model: Model) -> Geometry:
    name = model.name_or_path
    base.refuse_adapter(model)
    if shipped := shipped_config(model):
        return _with_loss(geometry(shipped, name), shipped, model)
    try:
        config = config_json.read(config_file(model))
    except RecipeError:
        if (known := known_config(model)) is None:
            raise
        _warn_once(name)
        return _with_loss(geometry(known, name), known, model)
    config_json.check_expressions(config, name)
    return _with_loss(count(config, tensor_headers.read(model), name), config, model)


@functools.cache
def _warn_once(name: str) -> None:
    """Say once in a process whose sizes are not those of the hub: a plan reads them several times."""
    log.warning("%s: the hub did not answer; its sizes are those that Flytune knows of this name", name)


def geometry(config: dict[str, Any], name: str) -> Geometry:
    """Return the sizes that follow from a config.json in closed form.

    Raises:
        RecipeError: it lacks a size, has a wrong one, or is of a model type whose sizes do not follow from
            it.
    """
    with config_json.recipe_errors():
        return config_sizes.geometry(config, name)


def count(config: dict[str, Any], tensors: dict[str, Tensor] | None, name: str) -> Geometry:
    """Return the sizes of a model from its config.json and the tensors in its files, where these are at hand.

    Raises:
        RecipeError: config.json has no or wrong sizes, it and the weights disagree, or the model's type
            cannot be counted here.
    """
    with config_json.recipe_errors(), process_setup.paused():
        return counting.count(config, tensors, name)


def _with_added_tokens(sizes: Geometry, model: Model) -> Geometry:
    rows = sizes.vocab_size + len(model.extra_special_tokens)
    return sizes.model_copy(update={"vocab_size": vocabulary.rows_for(sizes.vocab_size, rows)})


def _with_loss(sizes: Geometry, config: dict[str, Any], model: Model) -> Geometry:
    """Return the sizes with what the table of model types says of its loss, and with its positions."""
    remote = model.trust_remote_code
    own_logits, problem = model_types.own_logits(config, remote), model_types.loss_problem(config, remote)
    whole = str(config.get("model_type"))
    is_known = whole in model_types.table() or whole in model_types.VISION_TYPES
    tried = whole if whole != sizes.model_type and is_known else None
    known: dict[str, Any] = {"own_logits": own_logits, "loss_problem": problem, "tried_as": tried}
    known["own_labels"] = _own_labels(config)
    if limit := positions.of(rope.scaled(config, model), model.name_or_path, remote):
        known |= {"positions": limit.tokens, "bounds_positions": limit.is_bound}
    known["rope_type"] = positions.scaling_of(config_json.text_part(config, model.name_or_path).content)
    return sizes.model_copy(update=known)


def _own_labels(config: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the names of the labels of a base model that is a classifier already, in order; None for
    others."""
    architectures, names = config.get("architectures"), config.get("id2label") or {}
    listed = architectures if isinstance(architectures, list) else []
    if not any(str(name).endswith("ForSequenceClassification") for name in listed):
        return None
    if not isinstance(names, dict) or not all(str(place).isdecimal() for place in names):
        return ()
    # transformers names two labels where config.json has none.
    in_order = [str(names[place]) for place in sorted(names, key=int)]
    return tuple(in_order or ("LABEL_0", "LABEL_1"))
