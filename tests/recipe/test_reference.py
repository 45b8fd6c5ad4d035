"""The reference of all recipe fields on docs/recipes.md, and the keys of recipes when fields are added."""

import json
import re

import pytest
import yaml
from pydantic import BaseModel, Field

from flytune import yaml_core
from flytune.planning import planner
from flytune.recipe import SECTIONS, HarnessTask, Recipe, Training, key, named_files
from flytune.recipe.method import Quantization
from tests.support.paths import ROOT
from tests.support.recipes import RECIPES, content, models_of

BLOCKS = [
    yaml_core.load(block)
    for block in re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs/recipes.md").read_text(encoding="utf-8"), re.DOTALL
    )
]
OLD = ROOT / "tests/support/releases/0.1.0/recipe.json"


def fields_of(model, prefix=""):
    """Yield the dotted name and the definition of each field that has a value of its own."""
    for name, field in model.model_fields.items():
        sections = models_of(field.annotation)
        for section in sections:
            yield from fields_of(section, f"{prefix}{name}.")
        if not sections:
            yield f"{prefix}{name}", field


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
    others = {
        "data.dataset_name",
        "data.dataset_config",
        "data.dataset_split",
        "data.revision",
        "data.heldout_path",
    }
    others |= {
        f"data.{name}" for name in ("eval_split", "add_bos_token", "add_eos_token", "exclude", "sample_by")
    }
    others |= {"data.images", "data.max_pixels", "model.vision"}  # for models that read images alone
    others |= {"sharding.replicas", "sharding.sequence_parallel", "method.adapter", "training.max_steps"}
    others |= {"publish.approval.hours"}
    others |= {
        f"objective.{name}"
        for section in SECTIONS.values()
        for name in section.model_fields
        if name != "name"
    }
    others |= {f"method.{name}" for name in Quantization.model_fields}
    scalings = {name for name, _ in fields_of(Recipe) if name.startswith("model.rope_scaling.")}
    others |= scalings - keys_of(BLOCKS[0])
    missing = {name for name, _ in fields_of(Recipe)} - keys_of(complete(BLOCKS[0]))
    assert {
        name
        for name in missing
        if not name.startswith(("data.sources.", "objective.rewards.", "objective.engine."))
    } == others - {"objective.rewards", "objective.engine"}


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_every_block_of_the_page_is_a_recipe(block):
    recipe = Recipe.model_validate(named_files.with_contents(BLOCKS[0] | BLOCKS[block]))
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_the_reference_has_a_plan():
    assert planner.make(Recipe.model_validate(named_files.with_contents(BLOCKS[0]))).verdict == "fits"


def test_what_is_always_hashed_are_the_fields_of_0_1_0():
    old = keys_of(json.loads(OLD.read_text()))
    assert len(old) > 90
    always = {f"{place}.{name}".lstrip(".") for place, names in key._FIRST.items() for name in names.split()}
    # The keys of `columns` are a user's.
    assert always == {name for name in old if ".columns." not in name}


class LaterTask(HarnessTask):
    repeats: int = 1


class LaterEvaluation(Recipe.model_fields["evaluation"].annotation):
    tasks: list[LaterTask] = Field(default=[])


class Schedules(Training):
    cooldown_steps: int = 0
    betas: list[float] = Field(default=[0.9, 0.999])


class Alerts(BaseModel):
    level: int = 1


class Later(Recipe):
    training: Schedules
    evaluation: LaterEvaluation = LaterEvaluation()
    alerts: Alerts = Alerts()


def test_a_new_field_keeps_the_keys_of_old_recipes_until_it_is_set():
    recipe = content(evaluation={"tasks": ["gsm8k", {"name": "mmlu", "limit": 3}]})
    unchanged = Recipe.model_validate(recipe).key()
    assert Later.model_validate(recipe).key() == unchanged
    training, task = recipe["training"], {"name": "gsm8k"}
    kept = [{"training": training | {"cooldown_steps": 0, "betas": [0.9, 0.999]}}, {"alerts": {"level": 1}}]
    assert {Later.model_validate(recipe | changes).key() for changes in kept} == {unchanged}
    changed = [
        {"training": training | {"cooldown_steps": 5}},
        {"training": training | {"betas": [0.9, 0.95]}},
        {"alerts": {"level": 2}},
        {"evaluation": {"tasks": [task | {"repeats": 2}, {"name": "mmlu", "limit": 3}]}},
    ]
    assert len({unchanged, *(Later.model_validate(recipe | changes).key() for changes in changed)}) == 5


class OtherDefault(Training):
    weight_decay: float = 0.5


class Changed(Recipe):
    training: OtherDefault


def test_a_field_of_the_first_release_may_get_another_default():
    recipe = content()
    set_to = {
        value: recipe | {"training": recipe["training"] | {"weight_decay": value}} for value in (0.1, 0.5)
    }
    keys = {value: Recipe.model_validate(sections).key() for value, sections in set_to.items()}
    assert keys[0.1] != keys[0.5]
    assert {value: Changed.model_validate(sections).key() for value, sections in set_to.items()} == keys
    assert Changed.model_validate(recipe).key() == keys[0.5]
