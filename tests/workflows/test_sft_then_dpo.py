"""Tests of supervised, then preference tuning, by `pyflyte run` on the tiny model, and of its parts."""

from collections import OrderedDict
from pathlib import Path

import pytest
import yaml
from flytekit.tools.translator import get_serializable

from flytune.adapters import merging
from flytune.errors import ExportError, RecipeError
from flytune.evaluation import guards
from flytune.files import sha256_of
from flytune.recipe import Recipe
from flytune.records import Manifest, Metrics
from flytune.records.lineage import LINEAGE, Lineage
from tasks.merge import check_stages, pass_guards
from tests.support.plans import recipe_of
from tests.support.preferences import write_preferences
from tests.support.pyflyte import pyflyte_run
from tests.support.registration import SETTINGS
from tests.support.reports import metrics
from tests.support.stages import plan_for
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs
from workflows.sft_then_dpo import sft_then_dpo


def recipes(folder, method="lora"):
    """Return a supervised recipe and one of preferences, which both store their artifacts below `folder`."""
    base, stored = tiny_base(folder), {"publish": {"address": str(folder / "store")}}
    common = {"method": method, "training.max_steps": 2, **stored}
    first = tiny_recipe(base, write_pairs(folder / "sft.jsonl", 48), common)
    second = tiny_recipe(
        base, write_preferences(folder / "dpo.jsonl", 48), common | {"objective": "dpo", "name": "tiny-dpo"}
    )
    return first, second


def stored_artifact(folder, name):
    (found,) = (
        file.parent for file in (folder / "store").glob("*/artifact.json") if named(file.parent) == name
    )
    return found


def named(artifact):
    return yaml.safe_load((artifact / "recipe.yaml").read_text())["name"]


def weights_of(folder):
    return {file.name: sha256_of(file) for file in folder.glob("*.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_preferences_are_tuned_on_the_supervised_model(method, tmp_path):
    options = []
    for option, recipe in zip(("--recipe", "--preference"), recipes(tmp_path, method), strict=True):
        file = tmp_path / f"{recipe['name']}.yaml"
        file.write_text(yaml.safe_dump(recipe))
        options += [option, file]
    done = pyflyte_run(["workflows/sft_then_dpo.py", "sft_then_dpo", *options], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = stored_artifact(tmp_path, "tiny"), stored_artifact(tmp_path, "tiny-dpo")
    (run,) = Lineage.read(second / LINEAGE).runs
    assert (run.name, run.objective, run.method) == ("tiny", "sft", method)
    assert run.base == str(tmp_path / "tiny")
    assert run.data_sha256 == Manifest.read(first / "manifest.json").content_sha256
    assert yaml.safe_load(run.recipe) == yaml.safe_load((first / "recipe.yaml").read_text())
    assert not (first / LINEAGE).exists(), "its base is not a model of a run"
    for text in ((second / "README.md").read_text(), (second / "report.html").read_text()):
        assert "the model of tiny" in text
        assert run.data_sha256[:12] in text
    recipe = Recipe.from_yaml(second / "recipe.yaml")
    assert recipe.model.name_or_path != run.base
    model = first
    if method == "lora":
        model = tmp_path / "merged"
        merging.merge(first, model)
        assert Lineage.read(model / LINEAGE).runs == [run]
    assert weights_of(Path(recipe.model.name_or_path)) == weights_of(model), (
        "its base is the model of the first run"
    )
    assert Metrics.read(second / "metrics.json").figures[0].name == "preference_loss"


def test_two_recipes_that_cannot_follow_each_other_are_refused():
    supervised = recipe_of(name="a")
    with pytest.raises(RecipeError) as refused:
        check_stages(recipe=supervised, preference=supervised, plan=plan_for(supervised))
    said = str(refused.value)
    assert (
        "--preference: objective: sft; the second run compares answers: write objective: dpo, kto or reward"
        in said
    )
    assert "both recipes are named a" in said
    model = supervised.model.model_copy(update={"name_or_path": "other/model"})
    other = recipe_of(name="b", objective="dpo").model_copy(update={"model": model})
    with pytest.raises(RecipeError, match=r"model.name_or_path: other/model, but the first run trains"):
        check_stages(recipe=supervised, preference=other, plan=plan_for(supervised))


def test_broken_guards_stop_the_second_run(tmp_path, monkeypatch):
    from flytekit.types.directory import FlyteDirectory

    recipe = recipe_of(name="a", method="full")
    metrics().write(tmp_path / "metrics.json")
    plan_for(recipe).write(tmp_path / "plan.json")
    folder = FlyteDirectory(str(tmp_path))
    assert pass_guards(recipe=recipe, artifact=folder) == "none"
    monkeypatch.setattr(guards, "broken", lambda recipe, metrics: ["sums acc fell"])
    with pytest.raises(ExportError, match=r"a: sums acc fell; the next run does not start"):
        pass_guards(recipe=recipe, artifact=folder)


def test_its_registration_has_one_finetune_for_both_runs():
    spec = get_serializable(OrderedDict(), SETTINGS, sft_then_dpo).to_flyte_idl()
    assert [workflow.id.name for workflow in spec.sub_workflows] == ["workflows.finetune.finetune"]
    # A third of the 2 MB that flyteadmin reads by default.
    assert len(spec.SerializeToString()) < 2_000_000 / 3
