"""Each default of TRL's that decides a loss, a mask, a figure or a dtype is a decision of ours, in
trl_defaults.yaml."""

import dataclasses
import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from flytune.hardware import shape_named
from flytune.objectives import OBJECTIVES
from flytune.objectives.bound import BoundRecipe
from flytune.planning import planner
from flytune.recipe import SECTIONS, Recipe
from flytune.training import trainer
from tests.support import changed_base, objective_runs
from tests.support.tiny import tiny_base, tiny_recipe

DECISIONS = yaml.safe_load(Path(__file__).with_name("trl_defaults.yaml").read_text())
CLASSES = {
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "kto": "KTOConfig",
    "reward": "RewardConfig",
    "grpo": "GRPOConfig",
    "classify": "RewardConfig of classify",
    "embed": "RewardConfig of embed",
    "distill": "SFTConfig of distill",
}


def merged(config, part):
    """Return the decisions of a part on the arguments of a class, of which its own replace the common
    ones."""
    own = DECISIONS[config]
    named = {name for other in ("recipe", "set", "left") for name in own.get(other, {})}
    common = {
        name: value
        for name, value in DECISIONS["TrainingArguments"].get(part, {}).items()
        if name not in named
    }
    return common | own.get(part, {})


def others(config):
    return f"{DECISIONS['TrainingArguments']['others']} {DECISIONS[config].get('others', '')}".split()


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_each_argument_has_one_decision(objective):
    import trl

    config = CLASSES[objective]
    names = {field.name for field in dataclasses.fields(getattr(trl, config.partition(" ")[0]))}
    decided = [name for part in ("recipe", "set", "left") for name in merged(config, part)]
    assert len(set(decided)) == len(decided)
    undecided = {
        name
        for name in names - {*decided}
        if not any(fnmatchcase(name, pattern) for pattern in others(config))
    }
    assert not undecided, "say in trl_defaults.yaml what they decide"
    own = {name for part in ("recipe", "set", "left") for name in DECISIONS[config].get(part, {})}
    assert not own - names, "the release has none of these"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tiny_base(tmp_path_factory.mktemp("base"))
    changed_base.write_teacher(folder, folder.parent / objective_runs.TEACHER)
    return folder


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_what_is_left_is_what_the_decision_was_made_for(objective, base, tmp_path):
    recipe = Recipe.model_validate(
        tiny_recipe(base, tmp_path / "rows", {"objective": objective_runs.section_of(objective, base.parent)})
    )
    plan = planner.make(recipe)
    arguments = trainer.arguments(BoundRecipe(recipe), plan, shape_named(plan.shape), tmp_path)
    for name, (default, _) in merged(CLASSES[objective], "left").items():
        if hasattr(arguments, name):
            value = getattr(arguments, name)
            assert json.loads(json.dumps(getattr(value, "value", value))) == default, name


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_the_fields_are_those_of_a_recipe(objective):
    for path in merged(CLASSES[objective], "recipe").values():
        section, _, name = path.partition(".")
        model = SECTIONS[objective] if section == "objective" else Recipe.model_fields[section].annotation
        assert name in model.model_fields, path


def test_clip_ranges_are_those_of_the_papers():
    def arguments(**section):
        recipe = Recipe.model_validate(
            tiny_recipe(Path("/base"), Path("/rows"), {"objective": {"name": "grpo"} | section})
        )
        made = OBJECTIVES["grpo"](recipe).arguments()
        return made["epsilon"], made["epsilon_high"]

    assert arguments(loss_type="grpo") == (0.2, 0.2)
    assert arguments(loss_type="dapo") == (0.2, 0.28)
    assert arguments(loss_type="cispo")[1] == 5.0, (
        "of the weight itself, which is 1: TRL's 0.2 trains a fifth of the loss"
    )
    assert arguments(loss_type="grpo", importance_sampling_level="sequence") == (3e-4, 4e-4)
    assert arguments(loss_type="grpo", epsilon=0.1) == (0.1, 0.1)
    assert arguments(loss_type="dapo", epsilon_high=0.5) == (0.2, 0.5)
