"""FSDP in groups (sharding.replicas): four gloo ranks in a mesh of two by two train what plain FSDP trains,
the plan says what it costs, and `auto` takes the faster way that fits."""

import shutil
from pathlib import Path

import pytest

from flytune.errors import DoesNotFit, RecipeError
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.sharding import sharding_of
from flytune.training import loop, step_log
from tests.support import ranks
from tests.support.process_kills import kill_once_saved
from tests.support.saved_runs import recipe_for
from tests.support.tiny import tiny_recipe

FOUR = shape_named("cpu-2").model_copy(update={"name": "cpu-4", "processes": 4, "memory_gib": 40})
BOUND = 1e-5


def recipe_of(inputs, folder, replicas, method="full", **changes):
    sharding = {"name": "fsdp", "replicas": replicas}
    adapter = {} if method == "full" else {"lora_dropout": 0.0}
    changes = {"hardware.shape": "cpu-4", "method": {"name": method, **adapter}, **changes}
    return recipe_for(inputs, sharding, folder, **changes)


def fit(recipe, inputs, out, die_at=None):
    """Run once on four processes; return the result and the sizes of the meshes of the parameters."""
    meshes = set()
    record = step_log.Recorder.record

    def record_and_look(self, step, epoch, logs):
        record(self, step, epoch, logs)
        meshes.update(tuple(parameter.device_mesh.shape) for parameter in self._trainer.model.parameters())
        if step == die_at:
            kill_once_saved(recipe, die_at - 1)

    step_log.Recorder.record = record_and_look
    plan = planner.make(recipe, [FOUR])
    return loop.fit(recipe, plan, FOUR, inputs / "dataset", out), meshes


def trained(recipe, inputs, out):
    """Return losses and gradient norms of a run, its meshes, and the exported tensors."""
    from safetensors.torch import load_file

    result, meshes = ranks.run(4, fit, recipe, inputs, out)
    figures = [value for step in result.steps for value in (step.loss, step.grad_norm)]
    (file,) = [*out.glob("model/*.safetensors"), *out.glob("adapter/*.safetensors")]
    return figures, meshes, load_file(file)


@pytest.mark.parametrize(
    ("method", "dtype"), [("full", "float32"), ("lora", "float32"), ("qlora", "bfloat16")]
)
def test_a_mesh_of_two_groups_trains_as_plain_fsdp(method, dtype, inputs, tmp_path):
    runs = [
        trained(
            recipe_of(inputs, tmp_path / str(count), count, method, **{"model.dtype": dtype}),
            inputs,
            tmp_path / f"out-{count}",
        )
        for count in (1, 2)
    ]
    assert [meshes for _, meshes, _ in runs] == [{(4,)}, {(2, 2)}]
    (plain, _, weights), (figures, _, others) = runs
    assert figures == pytest.approx(plain, rel=BOUND if dtype == "float32" else 1e-2)
    if dtype == "float32":
        assert all((weights[name] - others[name]).abs().max() < 1e-4 for name in weights)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_killed_run_goes_on_with_other_groups(before, after, inputs, tmp_path):
    whole = trained(recipe_of(inputs, tmp_path / "whole", before), inputs, tmp_path / "out-whole")[0]
    name = {"checkpoints.name": "run"}
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        recipe = recipe_of(inputs, tmp_path / "kept", before, **name)
        ranks.run(4, fit, recipe, inputs, tmp_path / "killed", 3)
    recipe = recipe_of(inputs, tmp_path / "kept", after, **name)
    result, meshes = ranks.run(4, fit, recipe, inputs, tmp_path / "out")
    assert result.resumed_from_step == 2
    assert meshes == {(4,) if after == 1 else (2, 2)}
    assert [step.loss for step in result.steps] == pytest.approx(whole[::2], rel=BOUND)
    shutil.rmtree(tmp_path / "kept")


LARGE = {
    "model.name_or_path": "Qwen/Qwen3-8B",
    "model.revision": "b968826d9c46dd6066d109eabc6255188de91218",
    "model.dtype": "bfloat16",
    "training.global_batch_size": 64,
    "training.activation_checkpointing": True,
    "data.max_length": 4096,
    "hardware.shape": "a100-80gb-8x2",
    "checkpoints.folder": "s3://b/c",
}


def large(replicas, **changes):
    sharding = {"name": "fsdp", "replicas": replicas}
    return Recipe.model_validate(tiny_recipe(Path("x"), Path("y"), LARGE | {"sharding": sharding} | changes))


def test_the_plan_takes_the_faster_way_that_fits_and_says_what_the_other_costs():
    lora = {"method": "lora"}
    recipe, plan = planner.decide(large("auto", **lora))
    assert recipe.sharding.replicas == "nodes"
    assert any(line.startswith("sharding.replicas: 1 instead of nodes would take") for line in plan.reasons)
    times = {
        count: sum(planner.make(large(count, **lora)).step_seconds.values()) for count in (1, 2, "nodes")
    }
    assert times["nodes"] == times[2] < times[1]
    memory = {count: planner.make(large(count, **lora)).needs[0].peak_bytes for count in (1, 2)}
    assert memory[1] < memory[2]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"sharding": {"name": "zero3", "replicas": 2}},
            RecipeError,
            "sharding.replicas: 2 with sharding zero3",
        ),
        ({"sharding": {"name": "fsdp", "replicas": 3}}, DoesNotFit, "replicas that go: 1, 2, 4, 8"),
        ({"sharding": {"name": "fsdp", "replicas": 16}}, DoesNotFit, "replicas that go: 1, 2, 4, 8"),
        ({"sharding": {"name": "auto", "replicas": 2}}, RecipeError, "replicas: with auto the plan chooses"),
    ],
)
def test_groups_that_cannot_be_made_are_refused(changes, error, said):
    with pytest.raises(error, match=said):
        planner.make(large(1, **changes))


def test_a_group_is_within_a_node_where_it_can_be():
    shape = shape_named("a100-80gb-8x2")
    assert sharding_of(large("nodes")).degrees(shape).shards == shape.processes
