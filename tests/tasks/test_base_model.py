"""Tests of the base model: fetched once at its commit, read by pods without a hub, or read from an
address."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flytekit import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.types.directory import FlyteDirectory

from flytune.errors import RecipeError
from flytune.hardware import Cluster
from flytune.models import base as models_base
from flytune.models.remote import files_to_fetch
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import Model, Recipe
from flytune.records import Metrics
from flytune.stages import base_model, stored, table
from flytune.stages.orchestrator import Folder
from tasks.base_model import fetch_base_model
from tasks.evaluate import EVALUATE
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.runtime.orchestrator import FLYTE
from tasks.runtime.values import TYPES
from tasks.train import TRAIN
from tests.support.model_hub import FIRST, NAME, SECOND, serving
from tests.support.paths import ROOT
from tests.support.pods import pod
from tests.support.tiny import cluster_recipe, tiny_base, tiny_recipe, write_pairs

EXECUTION = """
import json, sys
from flytekit import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytune.recipe.recipe import Recipe
from tasks.base_model import fetch_base_model
from tasks.plan import make_plan

recipe = Recipe.model_validate(json.loads(sys.argv[1]))
provider = FileAccessProvider(sys.argv[3], sys.argv[2])
with FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(provider)):
    planned = make_plan(recipe=recipe)
    base = fetch_base_model(base=planned.base)
print(json.dumps([planned.request.model.revision, planned.base.commit, base.remote_source or str(base.path)]))
"""


def execution(recipe, raw, home, seen):
    """Run an execution with a shared cache; return the commits of the data request and of the base model, and
    its address."""
    home.mkdir(exist_ok=True)
    environment = os.environ | {"HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": str(ROOT), **seen}
    command = [sys.executable, "-c", EXECUTION, json.dumps(recipe), raw, str(home / "local")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def storage(bucket):
    """A cluster's storage: the address of outputs, and the environment of pods."""
    names = {"FLYTE_AWS_ENDPOINT": "AWS_ENDPOINT_URL", "FLYTE_AWS_ACCESS_KEY_ID": "AWS_ACCESS_KEY_ID"}
    names["FLYTE_AWS_SECRET_ACCESS_KEY"] = "AWS_SECRET_ACCESS_KEY"
    return f"{bucket}/ab/execution-n0-0", {name: os.environ[key] for name, key in names.items()}


def stored_below(address):
    import s3fs

    filesystem = s3fs.S3FileSystem()
    filesystem.invalidate_cache()
    root = address.removeprefix("s3://")
    return {name.removeprefix(root).strip("/"): name for name in filesystem.find(root)}


@pytest.mark.slow
def test_a_model_of_the_hub_is_fetched_once_and_pods_contact_no_hub(storage, tmp_path):
    raw, seen = storage
    folder = tiny_base(tmp_path / "hub")
    weights = (folder / "model.safetensors").read_bytes()
    # Files of a repository that are not loaded.
    (folder / "consolidated.safetensors").write_bytes(weights)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling.py").write_text("print('never run')\n")
    changes = {"model.name_or_path": NAME, "method": "lora", "hardware.shape": "cpu-2", "sharding": "ddp"}
    recipe = cluster_recipe(folder, write_pairs(tmp_path / "pairs.jsonl", 64), changes)
    with serving(folder) as hub:
        first = execution(recipe, raw, tmp_path / "home", seen | hub.environment())
        assert first[:2] == [FIRST, FIRST]
        assert first[2].startswith("s3://")
        cached = f"models--{NAME.replace('/', '--')}"
        names = set(stored_below(first[2]))
        assert {f"{cached}/refs/main", f"{cached}/snapshots/{FIRST}/model.safetensors"} <= names
        assert f"{cached}/snapshots/{FIRST}/tokenizer.json" in names
        assert not [name for name in names if name.endswith((".bin", ".py", "consolidated.safetensors"))]
        assert hub.fetched(".safetensors") == 1
        # Another execution with another learning rate fetches nothing.
        again = execution(
            recipe | {"training": recipe["training"] | {"learning_rate": 1e-5}},
            raw,
            tmp_path / "home",
            seen | hub.environment(),
        )
        assert again == first
        assert hub.fetched(".safetensors") == 1
        # The branch has moved to another commit.
        hub.commit = SECOND
        moved = execution(recipe, raw, tmp_path / "home", seen | hub.environment())
        assert moved[:2] == [SECOND, SECOND]
        assert moved[2] != first[2]
        assert hub.fetched(".safetensors") == 2

        given = Recipe.model_validate(recipe)
        cpu = seen | hub.environment()
        planned = pod(make_plan, tmp_path / "plan", raw, cpu, recipe=given)
        dataset = pod(
            prepare_data,
            tmp_path / "prepare",
            raw,
            cpu,
            request=planned["request"],
            scratch_folder=planned["scratch_folder"],
        )["o0"]
        gpu = cpu | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "scratch" / "hub")}
        before = len(hub.asked)
        inputs = {"recipe": given, "dataset": dataset, "base": FlyteDirectory(moved[2])}
        trained = pod(TRAIN["cpu-2"], tmp_path / "train", raw, gpu, plan=planned["plan"], **inputs)
        assert isinstance(trained, dict), trained.error.message
        assert len(list((tmp_path / "scratch" / "hub").glob(".unpacked-*[!k]"))) == 1, (
            "two ranks unpacked it once"
        )
        metrics = pod(EVALUATE["cpu-2"], tmp_path / "evaluate", raw, gpu, trained=trained["o0"], **inputs)
        assert isinstance(metrics, dict), metrics.error.message
        assert isinstance(metrics["o0"], Metrics)
        assert len(hub.asked) == before, hub.asked[before:]
    config = json.loads((Path(trained["o0"].download()) / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (NAME, SECOND)


def test_a_run_on_this_machine_copies_nothing(tmp_path):
    folder = tiny_base(tmp_path / "hub")
    recipe = tiny_recipe(folder, write_pairs(tmp_path / "pairs.jsonl", 8), {"model.name_or_path": NAME})
    with serving(folder) as hub:
        _, commit, place = execution(recipe, str(tmp_path / "raw"), tmp_path / "home", hub.environment())
        assert commit == FIRST
        assert hub.fetched(".safetensors") == 0
    assert [path.name for path in Path(place).iterdir()] == ["base.json"]


def test_a_missing_stored_base_model_says_what_to_do(storage, monkeypatch, tmp_path):
    from huggingface_hub import constants

    for name, value in storage[1].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    gone = FlyteDirectory("unused")
    gone._remote_source = f"{storage[0]}/gone"
    with pytest.raises(Exception, match=r"the stored base model is gone; run again with --overwrite-cache"):
        base_model.unpack(FLYTE, TYPES.to_stage(gone, Folder))


def test_a_model_cache_on_a_volume_replaces_the_copy(storage, monkeypatch, tmp_path):
    from huggingface_hub import constants

    raw, environment = storage
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "node"))
    folder, copies = tiny_base(tmp_path / "hub"), []

    def copy_from_hub(wanted, put, scratch, has=None):
        for file in sorted(folder.iterdir()):
            name = f"models--{NAME.replace('/', '--')}/snapshots/{wanted.commit}/{file.name}"
            if has is None or not has(name, file.stat().st_size):
                copies.append(has is None)
                put(file, name)

    monkeypatch.setattr(models_base, "copy_from_hub", copy_from_hub)
    request = models_base.BaseRequest(name_or_path=NAME, commit=FIRST)

    def fetched(read_only, commit):
        volume = {
            "name": "m",
            "nfs": {"server": "s", "path": "/m"},
            "mount_path": str(tmp_path / "mnt"),
            "read_only": read_only,
        }
        cluster = Cluster(volumes=[volume], model_cache=str(tmp_path / "mnt" / "hub"))
        monkeypatch.setattr(base_model, "load_cluster", lambda: cluster)
        provider = FileAccessProvider(str(tmp_path / "local"), raw)
        with FlyteContextManager.with_context(
            FlyteContextManager.current_context().with_file_access(provider)
        ):
            asked = request.model_copy(update={"commit": commit})
            made = fetch_base_model.task_function(base=asked)
            if not str(made.path).startswith("s3://"):  # as flytekit stores an output
                made = FlyteDirectory(stored.store(FLYTE, Path(made.path)).address)
            made._remote_source = str(made.path)
            base_model.unpack(FLYTE, TYPES.to_stage(made, Folder))
        return tmp_path / "node" / f"models--{NAME.replace('/', '--')}" / "snapshots" / commit

    linked = fetched(read_only=False, commit=FIRST)
    assert set(copies) == {False}
    assert linked.is_symlink()
    assert (linked / "model.safetensors").samefile(
        tmp_path / "mnt" / "hub" / linked.relative_to(tmp_path / "node") / "model.safetensors"
    )
    # A read-only volume that lacks the model: its files are copied to the cluster's storage.
    copies.clear()
    copied = fetched(read_only=True, commit=SECOND)
    assert set(copies) == {True}
    assert not copied.is_symlink()
    assert (copied / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_the_cache_of_outputs_depends_on_the_model_cache(monkeypatch):
    first = table._base_model_version()
    assert first == "1"
    volume = {"name": "m", "persistent_volume_claim": "m", "mount_path": "/mnt/m"}
    versions = set()
    for folder in ("/mnt/m/a", "/mnt/m/b"):
        monkeypatch.setattr(
            table, "load_cluster", lambda folder=folder: Cluster(volumes=[volume], model_cache=folder)
        )
        versions.add(table._base_model_version())
    assert len(versions | {first}) == 3


def upload(folder, address):
    import fsspec

    fsspec.filesystem("s3").put(str(folder), address.removeprefix("s3://"), recursive=True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_model_behind_an_address_is_planned_and_fetched_once(bucket, cache, tmp_path):
    folder = tiny_base(tmp_path)
    address = f"{bucket}/run/model"
    upload(folder, address)
    model, there = Model(name_or_path=address), Model(name_or_path=str(folder))
    assert read_geometry(model) == read_geometry(there)
    assert not list(cache.rglob("*.safetensors")), "planning reads the config alone"
    assert models_base.request(model).commit is None
    place = Path(models_base.local_name(model))
    assert (place / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    (place / "model.safetensors").touch()
    stamp = (place / "model.safetensors").stat().st_mtime_ns
    assert Path(models_base.local_name(model)) == place
    assert (place / "model.safetensors").stat().st_mtime_ns == stamp
    # The content at the address has changed: another folder, and another tokenizer in prepare_data's cache
    # key.
    before = models_base.tokenizer_identity(model)
    (folder / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text() + "\n")
    upload(folder / "tokenizer_config.json", f"{address}/tokenizer_config.json")
    assert models_base.tokenizer_identity(model) != before
    assert Path(models_base.local_name(model)) != place


@pytest.mark.slow
def test_a_run_from_an_address(bucket, cache, tmp_path, monkeypatch):
    from flytune.evaluation.score import score
    from flytune.export.gate import check_base
    from tests.support.stages import recipe_for, write_dataset, write_trained

    folder = tiny_base(tmp_path)
    upload(folder, f"{bucket}/run/model")
    dataset = write_dataset(tmp_path / "dataset", folder)
    recipe = recipe_for(Path("unused"), "lora", **{"model.name_or_path": f"{bucket}/run/model"})
    trained = write_trained(tmp_path / "trained", recipe, dataset, steps=2)
    config = json.loads((trained / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = recipe.model.name_or_path
    (trained / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    check_base(recipe, trained / "adapter")
    from flytune.export.folder import write_manifest

    write_manifest(recipe, trained / "adapter", None)
    assert score(recipe, trained, dataset).base.perplexity > 1


def test_addresses_without_a_model(bucket, cache, tmp_path):
    (tmp_path / "x.txt").write_text("x")
    upload(tmp_path / "x.txt", f"{bucket}/none/x.txt")
    with pytest.raises(RecipeError, match=r"s3://models/none: no config.json there; it holds x.txt"):
        models_base.local_name(Model(name_or_path=f"{bucket}/none"))
    with pytest.raises(RecipeError, match=r"nosuch://x: cannot be read: ValueError: Protocol not known"):
        models_base.local_name(Model(name_or_path="nosuch://x"))
    with pytest.raises(
        RecipeError,
        match=r"no such folder \(seen from .*; pods of a cluster see mounted folders and addresses",
    ):
        models_base.local_name(Model(name_or_path="/home/someone/model"))


def test_unreachable_storage_is_recoverable(bucket, cache, monkeypatch):
    from flytune.errors import StorageError

    def away(*args, **arguments):
        raise ConnectionError("reset by peer")

    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "find", away)
    with pytest.raises(
        StorageError, match="model.name_or_path: s3://models/x: cannot be read: ConnectionError"
    ) as caught:
        models_base.local_name(Model(name_or_path=f"{bucket}/x"))
    assert caught.value.goes_on


def test_files_of_a_model_that_are_fetched():
    files = [
        "config.json",
        "tokenizer.model",
        "original/params.json",
        "modeling.py",
        "README.md",
        "onnx/model.onnx",
    ]
    shards = ["model-1-of-2.safetensors", "model-2-of-2.safetensors", "consolidated.safetensors"]
    index = json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}).encode()
    assert files_to_fetch(files + shards, index, False, "x") == [
        "config.json",
        "tokenizer.model",
        *shards[:2],
    ]
    assert files_to_fetch([*files, "model.safetensors", shards[2]], None, True, "x") == [
        "config.json",
        "modeling.py",
        "tokenizer.model",
        "model.safetensors",
    ]
    with pytest.raises(
        RecipeError, match=r"x: it has no \*.safetensors, and no other weights are read; it holds README.md"
    ):
        files_to_fetch(files, None, False, "x")


def test_an_unknown_commit_is_refused_by_the_plan(tmp_path):
    model = Model(name_or_path="owner/none")
    with pytest.raises(
        RecipeError, match="owner/none: its commit is unknown because the hub did not answer; run again"
    ):
        models_base.require_commit(models_base.request(model), model)
    folder = Model(name_or_path=str(tiny_base(tmp_path)))
    assert models_base.require_commit(models_base.request(folder), folder).commit is None


def test_the_tokenizer_of_a_folder_is_part_of_the_data_s_key(tmp_path):
    folder = tiny_base(tmp_path)
    model = Model(name_or_path=str(folder))
    before = models_base.tokenizer_identity(model)
    (folder / "model.safetensors").touch()
    assert models_base.tokenizer_identity(model) == before
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("a", "b", 1))
    assert models_base.tokenizer_identity(model) != before


def test_an_artifact_is_a_base_model_and_only_its_model_is_fetched(bucket, cache, tmp_path):
    from tests.support.stages import write_dataset
    from tests.support.store import stored as stored_artifact

    base = tiny_base(tmp_path)
    artifact = stored_artifact(
        tmp_path / "store", base, write_dataset(tmp_path / "dataset", base), "whole", "full", steps=1
    )
    upload(artifact, f"{bucket}/accepted-1")
    place = Path(models_base.local_name(Model(name_or_path=f"{bucket}/accepted-1")))
    assert [path.relative_to(place).as_posix() for path in place.rglob("*.safetensors")] == [
        "model.safetensors"
    ]
    assert (place / "model.safetensors").read_bytes() == (artifact / "model.safetensors").read_bytes()
