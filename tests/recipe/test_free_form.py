"""Values of a recipe whose content is free: none of them tells a library to write somewhere."""

import typing

import pytest
from pydantic import BaseModel

from flytune.errors import RecipeError
from flytune.hardware import shape_named
from flytune.mistakes import alternatives, is_model
from flytune.recipe import SECTIONS, Recipe
from flytune.sharding import sharding_of
from flytune.sharding.deepspeed_config import DeepSpeedConfig
from tests.support.recipes import content, models_of

PATH = "/home/somebody/notes.txt"


def free(annotation):
    """Return whether a type has a mapping, or any value, in it."""
    inner = [one for one in (annotation, *alternatives(annotation)) if one is not None]
    return any(
        one in (dict, typing.Any, object)
        or typing.get_origin(one) is dict
        or any(free(part) for part in typing.get_args(one))
        for one in inner
        if not (isinstance(one, type) and issubclass(one, BaseModel))
    )


def free_fields(model, prefix=""):
    for name, field in model.model_fields.items():
        for section in models_of(field.annotation):
            yield from free_fields(section, f"{prefix}{name}.")
        if free(field.annotation):
            yield f"{prefix}{name}"


def refused(changes):
    with pytest.raises(RecipeError):
        Recipe.model_validate(content(**changes))


def is_a_column_alone():
    """Names of columns are looked up in rows, and open nothing: tests/data/test_formats.py."""
    data = content()["data"] | {"columns": {"completion": PATH}}
    assert Recipe.model_validate(content(data=data)).data.columns == {"completion": PATH}


def is_an_argument_of_a_schedule():
    training = content()["training"]
    for kind in ("cosine", "warmup_stable_decay", "polynomial"):
        for key in ("decay_type", "warmup_type", "power", "output_file"):
            given = {"num_decay_steps": 2, key: PATH} if kind == "warmup_stable_decay" else {key: PATH}
            refused({"training": training | {"lr_scheduler_type": kind, "lr_scheduler_kwargs": given}})


def is_a_number_of_a_layer():
    for name in ("rank_pattern", "alpha_pattern"):
        refused({"method": {"name": "lora", name: {"q_proj": PATH}}})


def names_no_place():
    for name in keys_of(DeepSpeedConfig):
        config = {"zero_optimization": {"stage": 3}}
        *above, last = name.split(".")
        section = config
        for part in above:
            section = section.setdefault(part, {})
        section[last] = PATH
        if last == "nvme_path":
            section["device"] = "nvme"
        recipe = Recipe.model_validate(content(sharding={"name": "zero3", "config": config}))
        sharding = sharding_of(recipe)
        assert sharding.problems() or sharding.misfit(shape_named("cpu-2")), name


def keys_of(model, prefix=""):
    """Yield the names of all keys, of keys of free mappings below, and of one that no section knows."""
    yield f"{prefix}output_path"
    for name, field in model.model_fields.items():
        sections = [alternative for alternative in alternatives(field.annotation) if is_model(alternative)]
        for section in sections:
            yield from keys_of(section, f"{prefix}{name}.")
        yield f"{prefix}{name}.output_path" if free(field.annotation) else f"{prefix}{name}"


def is_a_weight_of_a_label():
    refused({"objective": {"name": "classify", "class_weight": {PATH: 2.0}}})
    refused({"objective": {"name": "classify", "class_weight": {"0": PATH}}})


DECISIONS = {
    "data.columns": is_a_column_alone,
    "data.sources.columns": is_a_column_alone,
    "method.rank_pattern": is_a_number_of_a_layer,
    "method.alpha_pattern": is_a_number_of_a_layer,
    "training.lr_scheduler_kwargs": is_an_argument_of_a_schedule,
    "sharding.config": names_no_place,
    "objective.class_weight": is_a_weight_of_a_label,
}
"""Decisions on each field of a recipe that takes a mapping of any keys, or any value."""


def test_every_free_form_field_has_a_decision():
    assert set(free_fields(Recipe)) == set(DECISIONS)


@pytest.mark.parametrize("field", DECISIONS)
def test_a_path_in_it_is_refused_or_opens_nothing(field):
    DECISIONS[field]()


@pytest.mark.parametrize("path", [PATH, "/tmp/../home/somebody", "notes", "/tmp/x/../../etc", "/mnt/../etc"])
def test_an_nvme_path_is_on_the_scratch_disk_or_a_volume_on_a_persons_machine_too(path):
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": path}}
    recipe = Recipe.model_validate(content(sharding={"name": "zero3", "config": {"zero_optimization": zero}}))
    shape = shape_named("cpu-2").model_copy(update={"nvme": True})
    assert "which no pod has" in sharding_of(recipe).misfit(shape)
    zero["offload_optimizer"]["nvme_path"] = "/tmp/flytune-nvme"
    recipe = Recipe.model_validate(content(sharding={"name": "zero3", "config": {"zero_optimization": zero}}))
    assert sharding_of(recipe).misfit(shape) is None


def floats_of(model, prefix=""):
    for name, field in model.model_fields.items():
        for section in models_of(field.annotation):
            yield from floats_of(section, f"{prefix}{name}.")
        if any(alternative is float for alternative in alternatives(field.annotation)):
            yield f"{prefix}{name}"


SMALL = {
    "training.hang_minutes": 1e-29,
    "training.router_aux_loss_coef": 1e-9,
    "data.sources.weight": 1e-9,
    "objective.rewards.weight": -1e-9,
    "objective.center_rewards_coefficient": 1e-9,
}
"""Numbers that float32 has, and with which a run would wait for nothing or train nothing."""


def test_numbers_without_an_effect_are_refused_in_every_field():
    names = [*dict.fromkeys(floats_of(Recipe)), "sharding.config.gradient_clipping"]
    assert len(names) > 30
    for name, value in [*((name, 1e-300) for name in names), *SMALL.items()]:
        section, *path = name.split(".")
        usual = content().get(section) or {}
        made = {"name": usual} if isinstance(usual, str) else dict(usual)
        if path[0] == "sources":
            made = {"sources": [{"path": "x", "weight": value}]}
        elif path[0] == "rewards":
            made = {"name": "grpo", "rewards": [{"name": "exact_answer", "weight": value}]}
        elif path[0] == "config":
            made = {"name": "zero3", "config": {"gradient_clipping": value}}
        elif section == "objective":
            made = next(
                {"name": kind, path[0]: [value] if path[0] == "loss_weights" else value}
                for kind, section in SECTIONS.items()
                if path[0] in section.model_fields
            )
        elif path[0] == "must_not_fall":
            made = {"tasks": ["x"], "must_not_fall": [{"task": "x", "margin": value}]}
        else:
            made[path[0]] = value
        refused_as_small({section: made})
    refused_as_small({"objective": {"name": "grpo", "beta": 1e-9}})


def refused_as_small(changes):
    with pytest.raises(RecipeError, match="smaller|greater|counts for nothing|has no effect|too small"):
        Recipe.model_validate(content(**changes))
