"""The reference of all recipe fields on docs/recipes.md, and the keys of recipes when fields are added."""

import json
import re
import typing
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, Field

from flytune import yaml_core
from flytune.planning import planner
from flytune.recipe import HarnessTask, Objective, Recipe, Training
from flytune.recipe.quantization import Quantization
from tests.support.paths import ROOT
from tests.support.recipes import RECIPES, content

BLOCKS = [
    yaml_core.load(block)
    for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/recipes.md").read_text(encoding="utf-8"), re.DOTALL)
]
OLD = ROOT / "tests/support/releases/0.1.0/recipe.json"


def models_of(annotation):
    """List the models in a type: `Data`, `list[WeightedSource]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in models_of(argument)]


def fields_of(model, prefix=""):
    """Yield the dotted name and the definition of each field that has a value of its own."""
    for name, field in model.model_fields.items():
        sections = models_of(field.annotation)
        yield from fields_of(sections[0], f"{prefix}{name}.") if sections else [(f"{prefix}{name}", field)]


def keys_of(value, prefix=""):
    """Return the dotted names of all keys; list items have their list's name."""
    if isinstance(value, dict):
        names = {f"{prefix}{name}" for name in value}
        return names.union(*(keys_of(part, f"{prefix}{name}.") for name, part in value.items()))
    return set().union(*(keys_of(part, prefix) for part in value)) if isinstance(value, list) else set()


def complete(sections):
    """Return a section's `method: full` as the mapping that it is short for."""
    short = {
        name: {"name": value}
        for name, value in sections.items()
        if name in ("method", "sharding", "objective") and isinstance(value, str)
    }
    return sections | short


def test_every_field_is_set_in_a_shipped_recipe_or_on_the_page():
    shown = [*BLOCKS, *(yaml.safe_load(path.read_text()) for path in RECIPES)]
    there = set().union(*(keys_of(complete(sections)) for sections in shown))
    assert len(there) > 90
    assert [name for name, _ in fields_of(Recipe) if name not in there] == []


def test_the_reference_sets_every_field_but_those_of_other_sources_and_the_alternatives():
    others = {"data.dataset_name", "data.dataset_config", "data.dataset_split", "data.revision", "data.heldout_path"}
    others |= {"data.eval_split", "data.add_bos_token", "data.add_eos_token"}
    others |= {"method.adapter", "training.max_steps"}
    others |= {f"objective.{name}" for name in Objective.model_fields if name != "name"}
    others |= {f"method.{name}" for name in Quantization.model_fields}
    missing = {name for name, _ in fields_of(Recipe)} - keys_of(complete(BLOCKS[0]))
    assert {name for name in missing if not name.startswith("data.sources.")} == others


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_every_block_of_the_page_is_a_recipe(block):
    recipe = Recipe.model_validate(BLOCKS[0] | BLOCKS[block])
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_the_reference_has_a_plan():
    assert planner.make(Recipe.model_validate(BLOCKS[0])).verdict == "fits"


def test_fields_after_0_1_0_are_marked_with_their_version():
    old = keys_of(json.loads(OLD.read_text()))
    assert len(old) > 90
    new = [(name, field.json_schema_extra) for name, field in fields_of(Recipe) if name not in old]
    assert [name for name, extra in new if not (isinstance(extra, dict) and "since" in extra)] == []


def new(default: Any) -> Any:
    return Field(default=default, json_schema_extra={"since": "0.2.0"})


class LaterTask(HarnessTask):
    repeats: int = new(1)


class LaterEvaluation(Recipe.model_fields["evaluation"].annotation):
    tasks: list[LaterTask] = Field(default=[])


class Schedules(Training):
    cooldown_steps: int = new(0)
    betas: list[float] = new([0.9, 0.999])


class Alerts(BaseModel):
    level: int = 1


class Later(Recipe):
    training: Schedules
    evaluation: LaterEvaluation = LaterEvaluation()
    alerts: Alerts = new(Alerts())


def test_a_new_field_keeps_the_keys_of_old_recipes_until_it_is_set():
    recipe = content(evaluation={"tasks": ["gsm8k", {"name": "mmlu", "limit": 3}]})
    key = Recipe.model_validate(recipe).key()
    assert Later.model_validate(recipe).key() == key
    training, task = recipe["training"], {"name": "gsm8k"}
    kept = [{"training": training | {"cooldown_steps": 0, "betas": [0.9, 0.999]}}, {"alerts": {"level": 1}}]
    assert {Later.model_validate(recipe | changes).key() for changes in kept} == {key}
    changed = [
        {"training": training | {"cooldown_steps": 5}},
        {"training": training | {"betas": [0.9, 0.95]}},
        {"alerts": {"level": 2}},
        {"evaluation": {"tasks": [task | {"repeats": 2}, {"name": "mmlu", "limit": 3}]}},
    ]
    assert len({key, *(Later.model_validate(recipe | changes).key() for changes in changed)}) == 5


def test_a_field_without_a_mark_changes_all_keys():
    class Unmarked(Recipe):
        colour: str = "blue"

    assert Unmarked.model_validate(content()).key() != Recipe.model_validate(content()).key()
