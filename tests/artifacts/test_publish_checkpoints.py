"""Publishing of checkpoints to a hub during training."""

import json
import threading
from types import SimpleNamespace

import pytest

from flytune.artifacts.publish import checkpoints
from flytune.artifacts.publish.checkpoints import StepPublisher
from flytune.hardware import shape_named
from flytune.models import loading
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.training import loop
from flytune.training.checkpoints import Saver
from tests.support import objective_runs, ranks
from tests.support.mock_hub import ADDRESS, REPOSITORY
from tests.support.queries import write_queries
from tests.support.tiny import tiny_recipe

pytestmark = pytest.mark.filterwarnings("ignore:Use .content=<...>. to upload raw bytes:DeprecationWarning")
EVERY = {"publish.address": ADDRESS, "publish.every_save": True, "checkpoints.save_steps": 1}


def recipe_of(inputs, **changes):
    return Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", EVERY | changes))


def fit(recipe, inputs, out):
    checkpoints.PATIENCE = 300.0
    plan = planner.make(recipe)
    return loop.fit(
        recipe, plan, shape_named(plan.shape), inputs / "dataset", out, publisher=checkpoints.StepPublisher
    )


@pytest.mark.parametrize(
    ("method", "sharding", "world_size"),
    [
        pytest.param({"name": "lora", "init_lora_weights": "pissa"}, "none", 1, marks=pytest.mark.slow),
        pytest.param("full", "zero3", 2, marks=pytest.mark.slow),
        pytest.param("lora", "zero2", 2, marks=pytest.mark.slow),
        pytest.param("full", "fsdp", 2, marks=pytest.mark.slow),
        pytest.param("qlora", "fsdp", 2, marks=pytest.mark.slow),
        ("lora", "fsdp", 2),
    ],
)
def test_steps_are_branches_with_the_files_of_the_export(method, sharding, world_size, hub, inputs, tmp_path):
    changes = {
        "method": method,
        "sharding": sharding,
        "hardware.shape": f"cpu-{world_size}",
        "training.max_steps": 2,
    }
    folders = {"checkpoints.folder": str(tmp_path / "checkpoints"), "checkpoints.save_steps": 2}
    ranks.run(world_size, fit, recipe_of(inputs, **changes, **folders), inputs, tmp_path / "out")
    check_branch(hub, tmp_path / "out")


def test_a_branch_of_an_embedding_model_says_how_its_vectors_are_made(hub, tmp_path):
    folder = objective_runs.prepare(tmp_path / "inputs", "embed", write_queries)
    changes = EVERY | {"training.max_steps": 2, "checkpoints.save_steps": 2}
    recipe = objective_runs.recipe_for(folder, "embed", **changes)
    ranks.run(1, fit, recipe, folder, tmp_path / "out")
    check_branch(hub, tmp_path / "out")


def check_branch(hub, out):
    """Check that the hub has one branch, with the files of the export in `out` alone."""
    repository = hub.repositories[REPOSITORY]
    (branch,) = set(repository.branches) - {"main"}
    assert branch.startswith("tiny-")
    assert branch.endswith("-step-2")
    assert list(repository.files()) == [".gitattributes"]
    files = repository.files(branch)
    exported = loading.weights_folder(out)
    written = {
        path.relative_to(exported).as_posix(): path.read_bytes()
        for path in exported.rglob("*")
        if path.is_file()
    }
    assert files == written | {name: files[name] for name in (".gitattributes", "README.md", "artifact.json")}
    assert json.loads(files["artifact.json"])["files"], "what was published is listed"


@pytest.mark.slow
def test_training_continues_on_the_same_bits_after_weights_are_gathered(hub, inputs, tmp_path):
    from safetensors.torch import load_file

    exported = {}
    for every_save in (False, True):
        out = tmp_path / str(every_save)
        changes = {
            "publish.every_save": every_save,
            "checkpoints.folder": str(out / "checkpoints"),
            "model.dtype": "bfloat16",
        }
        sharding = {"name": "fsdp", "offload": "cpu"}
        recipe = recipe_of(
            inputs, sharding=sharding, **changes, **{"hardware.shape": "cpu-2", "training.max_steps": 3}
        )
        ranks.run(2, fit, recipe, inputs, out / "out")
        exported[every_save] = load_file(out / "out" / "model" / "model.safetensors")
        assert not [path for path in out.rglob("weights-*") if path.is_dir()]
    assert exported[True].keys() == exported[False].keys()
    assert all((exported[True][name] == exported[False][name]).all() for name in exported[True])
    assert any(branch.endswith("-step-1") for branch in hub.repositories[REPOSITORY].branches)


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "attempt" / "weights-7"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_what_fails_is_warned_of_alone(hub, inputs, weights, monkeypatch, caplog):
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    publisher = StepPublisher(recipe_of(inputs, method="lora"), "tiny-1")
    publisher.take(weights, 7)
    publisher.begin()
    publisher.finish()
    publisher.take(weights, 8)
    publisher.begin()
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("flytune")]
    assert warnings[0].startswith(
        "step 7 is not published: publish.address: hf://ada/sums: the hub does not know the token"
    )
    assert len(warnings) == 2
    assert warnings[1].startswith("step 8 is not published: [Errno 2]")
    assert not list(weights.parent.iterdir())


def test_training_does_not_wait(hub, inputs, weights, monkeypatch, caplog):
    """An upload that hangs: the end of the run waits its moment only."""
    goes_on = threading.Event()
    hub.broken = lambda route: goes_on.wait(60) if route == "put" else None
    monkeypatch.setattr(checkpoints, "PATIENCE", 0.5)
    publisher = StepPublisher(recipe_of(inputs, method="lora"), "tiny-1")
    publisher.take(weights, 7)
    publisher.begin()
    assert publisher.is_uploading
    publisher.finish()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "step 7 is not published: the run has finished before its upload",
    ]
    goes_on.set()
    monkeypatch.setattr(checkpoints, "PATIENCE", 60.0)
    publisher.finish()
    assert not publisher.is_uploading
    files = hub.repositories[REPOSITORY].files("tiny-1-step-7")
    assert files["adapter_model.safetensors"] == b"weights"
    assert files.keys() == {
        ".gitattributes",
        "adapter_model.safetensors",
        "adapter_config.json",
        "README.md",
        "artifact.json",
    }


def test_recipes_that_ask_for_what_there_is_not(inputs):
    none = recipe_of(inputs, **{"checkpoints.save_steps": None})
    assert none.refusals() == [
        "publish.every_save publishes the weights at each checkpoint, and none are written: set "
        "checkpoints.save_steps"
    ]
    assert recipe_of(inputs).refusals() == []


@pytest.mark.parametrize(
    ("uploading", "in_time", "bytes_needed", "reason"),
    [
        (False, True, 0, None),
        (True, True, 0, "an earlier step is still being uploaded"),
        (False, False, 0, "the run is being stopped"),
        (
            False,
            True,
            2**60,
            "bytes are free, a checkpoint and its gathered weights have 1,152,921,504,606,846,976",
        ),
    ],
)
def test_weights_are_gathered_only_where_they_can_be_published(
    uploading, in_time, bytes_needed, reason, inputs, tmp_path, caplog
):
    recipe = recipe_of(
        inputs, sharding="fsdp", **{"hardware.shape": "cpu-2", "checkpoints.folder": str(tmp_path)}
    )
    saver = Saver(recipe, "0" * 64, lambda *_: SimpleNamespace(is_uploading=uploading))
    saver.args, saver.folder, saver._gathered_bytes = ranks.ALONE, tmp_path, bytes_needed
    assert saver._gathers_now(7, in_time=in_time) == (reason is None)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (reason is not None)
    assert all(text.startswith("step 7 is not published: ") and text.endswith(reason) for text in said)
    assert not Saver(recipe, "0" * 64)._gathers_now(7, in_time=True), "nobody publishes them"
