"""Fields that `--set` changes."""

import pytest

from flytune.errors import RecipeError
from flytune.recipe import fields, read_recipe
from tests.support.paths import ROOT


def test_values_are_yaml_and_fields_are_dotted():
    path = ROOT / "recipes/demo-dpo.yaml"
    given = [
        "training.learning_rate=1e-4",
        "method.r=4",
        "evaluation.tasks=[gsm8k]",
        "checkpoints.save_steps=",
        "name=other",
    ]
    found = read_recipe(path, given)
    assert (found.training.learning_rate, found.method.r, found.name) == (0.0001, 4, "other")
    assert (found.evaluation.tasks[0].name, found.checkpoints.save_steps) == ("gsm8k", None)
    plain = read_recipe(path)
    assert (found.method.name, found.data) == (plain.method.name, plain.data)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["training.learning_rate"], "training.learning_rate: no value; write field=value"),
        (["a..b=1"], "a..b: no name of a field"),
        (["name=[1"], "name: not YAML"),
        (["name=a", "name=b"], "name: is set twice"),
    ],
)
def test_what_is_no_assignment_is_refused(given, words):
    with pytest.raises(RecipeError, match="--set") as raised:
        fields.assigned(given)
    assert words in str(raised.value)


def test_an_unknown_field_is_refused_as_in_a_file():
    with pytest.raises(RecipeError, match="training.learning_rat"):
        read_recipe(ROOT / "recipes/demo-dpo.yaml", ["training.learning_rat=1e-4"])
