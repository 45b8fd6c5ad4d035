"""Runs that start from an adapter: refusals at plan time, and the model that training starts with."""

import json
import re
import shutil

import pytest

from flytune.errors import RecipeError, TrainingError
from flytune.models import initial_adapter
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.storage import Storage
from tests.support import ranks
from tests.support.saved_runs import fit
from tests.support.tiny import tiny_recipe


def recipe_for(inputs, sharding, name="lora", **method):
    method = {"name": name, "lora_dropout": 0.0} | method
    single = sharding in ("none", "device_map")
    changes = {"method": method, "sharding": sharding, "hardware.shape": "cpu-1" if single else "cpu-2"}
    return Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))


def still(recipe):
    """The recipe of a run that changes nothing worth the name."""
    changes = {"learning_rate": 1e-8, "max_steps": 1, "warmup_steps": 0}
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=changes)})


@pytest.fixture(scope="session")
def trained(inputs, tmp_path_factory):
    """An adapter of each kind, well away from its base, with the loss that its live model had."""
    made = {}

    def of(name):
        if name not in made:
            out = tmp_path_factory.mktemp(name) / "trained"
            recipe = recipe_for(inputs, "none" if name == "lora" else "device_map", name)
            update = {"learning_rate": 1e-2}
            recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update=update)})
            made[name] = out, ranks.run(1, fit, recipe, inputs, out)
        return made[name]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        (name, sharding)
        for name in ("lora", "qlora")
        for sharding in ("none", "ddp", "zero1", "zero2", "zero3", "fsdp")
    ]
    + [("qlora", "device_map")],
)
def test_a_run_goes_on_from_the_adapter(name, sharding, inputs, trained, tmp_path):
    before, result = trained(name)
    recipe = recipe_for(inputs, sharding, name, adapter=str(before / "adapter"))
    world_size = planner.make(recipe).world_size
    again = ranks.run(world_size, fit, still(recipe), inputs, tmp_path / "again")
    assert again.heldout_loss == pytest.approx(result.heldout_loss, abs=1e-5)
    # Before any update, and below what the base model had on the same samples.
    assert again.steps[0].loss < result.steps[0].loss - 0.02


def config_of(trained):
    return json.loads((trained / "adapter" / initial_adapter.CONFIG).read_text())


def changed(trained, folder, **changes):
    shutil.copytree(trained / "adapter", folder)
    (folder / initial_adapter.CONFIG).write_text(json.dumps(config_of(trained) | changes))
    return str(folder)


@pytest.mark.parametrize(
    ("adapter", "recipe", "said"),
    [
        ({}, {"r": 4}, "method.r: 4, but the adapter of method.adapter has 16"),
        ({}, {"lora_alpha": 8}, "method.lora_alpha: 8, but the adapter of method.adapter has 32"),
        (
            {},
            {"target_modules": ["q_proj"]},
            "method.target_modules: ['q_proj'], but the adapter of method.adapter has ['down_",
        ),
        (
            {"use_dora": True},
            {},
            "method.use_dora: False, but the adapter of method.adapter has True; write that",
        ),
        (
            {"bias": "all"},
            {},
            "method.adapter: bias 'all' in adapter_config.json; a run can start from plain LoRA adapters "
            "only",
        ),
        ({"base_model_name_or_path": "a/other"}, {}, "was trained on a/other; name that one"),
    ],
)
def test_another_adapter_than_the_recipe_s_is_refused_at_plan_time(
    adapter, recipe, said, inputs, trained, tmp_path
):
    address = changed(trained("lora")[0], tmp_path / "adapter", **adapter)
    with pytest.raises(RecipeError) as caught:
        planner.make(recipe_for(inputs, "none", adapter=address, **recipe))
    assert said in str(caught.value)


def test_an_address_without_an_adapter_is_refused_at_plan_time(inputs, tmp_path):
    with pytest.raises(
        RecipeError,
        match=r"method\.adapter: .*: no adapter_config\.json there; name the artifact of an adapter",
    ):
        planner.make(recipe_for(inputs, "none", adapter=str(tmp_path)))


def test_bases_are_compared_by_what_is_known_of_them(inputs):
    def problem(name, base, revision=None, trained_on=None):
        recipe = recipe_for(inputs, "none")
        model = recipe.model.model_copy(update={"name_or_path": name, "revision": revision})
        config = {"base_model_name_or_path": base, "revision": trained_on}
        return initial_adapter._base_problems(recipe.model_copy(update={"model": model}), config)

    assert not problem("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")
    assert not problem("Qwen/Qwen3-8B", "/models/Qwen3-8B/")
    assert not problem("s3://bucket/Qwen3-8B", "/models/Qwen3-8B")
    assert problem("Qwen/Qwen3-8B", "other/Qwen3-8B")
    assert problem("Qwen/Qwen3-8B", "/models/Qwen3-4B")
    assert not problem("a/b", "a/b", "main", "1" * 40)
    assert problem("a/b", "a/b", "0" * 40, "1" * 40) == [
        f"model.revision: {'0' * 40}, but the adapter of method.adapter was trained on {'1' * 40}"
    ]


@pytest.mark.parametrize("bad", ["layers", "nan", "inf", "integers"])
def test_an_adapter_of_other_layers_or_values_that_are_not_finite_stops_the_load(
    bad, inputs, trained, tmp_path
):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "adapter"
    recipe = recipe_for(inputs, "none", adapter=changed(trained("lora")[0], folder))
    state = load_file(folder / initial_adapter.WEIGHTS)
    name = sorted(state)[-1]
    said = f"{re.escape(name)} in .* has values that are not finite"
    if bad == "layers":
        state = {name: tensor for name, tensor in state.items() if "q_proj" in name}
        said = "its layers are not those that method.target_modules names in this model"
    elif bad == "integers":
        state[name] = state[name].int()
    else:
        state[name].view(-1)[-1] = float(bad)
    save_file(state, folder / initial_adapter.WEIGHTS)
    with pytest.raises(ranks.RankFailed, match=said):
        ranks.run(1, fit, recipe, inputs, tmp_path / "out")


def test_an_adapter_that_is_cut_short_stops_the_load(inputs, trained, tmp_path):
    recipe = recipe_for(inputs, "none", adapter=changed(trained("lora")[0], tmp_path / "adapter"))
    (tmp_path / "adapter" / initial_adapter.WEIGHTS).write_bytes(b"cut")
    with pytest.raises(TrainingError, match=r"adapter_model\.safetensors cannot be read; the run stops"):
        initial_adapter.load_weights(None, recipe.method)


def test_full_training_takes_no_adapter(inputs):
    with pytest.raises(
        RecipeError, match="method: adapter: only for lora and qlora; full trains all weights"
    ):
        recipe_for(inputs, "none", "full", adapter="x", lora_dropout=0.05)


def test_an_adapter_is_read_from_an_address(bucket, inputs, trained):
    import fsspec

    filesystem = fsspec.filesystem("s3")
    for file in (initial_adapter.CONFIG, initial_adapter.WEIGHTS):
        filesystem.pipe_file(f"models/run/{file}", (trained("lora")[0] / "adapter" / file).read_bytes())
    assert initial_adapter.problems(recipe_for(inputs, "none", adapter="s3://models/run")) == []
    assert initial_adapter.problems(recipe_for(inputs, "none", adapter="s3://models/run/", r=2))
    assert len(Storage("s3://models/run").read(initial_adapter.WEIGHTS)) > 1000
