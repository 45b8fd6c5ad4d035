"""Tests of local runs by `pyflyte run`, with Elastic workers, and of prepare_data."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
from flytekit.types.directory import FlyteDirectory

from flytune import data
from flytune.data import mixture, progress, shards
from flytune.errors import DataError
from flytune.recipe import DataRequest, Recipe
from flytune.records import Metrics, Plan, TrainingResult
from flytune.stages.orchestrator import Folder
from flytune.stages.stored import local
from tasks.prepare import prepare_data
from tasks.runtime.orchestrator import FLYTE, Flyte
from tasks.runtime.values import TYPES
from tests.support.faults import planted
from tests.support.pyflyte import pyflyte
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_base(folder), write_pairs(folder / "pairs.jsonl", 80)


@pytest.mark.journey
@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({"sharding": "zero2", "hardware.shape": "cpu-2"}, "model.safetensors"),
        pytest.param(
            {"method": "qlora", "sharding": "device_map", "model.dtype": "bfloat16"},
            "adapter_model.safetensors",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["full-zero2-elastic", "qlora-one-process"],
)
def test_a_recipe_becomes_an_artifact(changes, weights, inputs, tmp_path):
    recipe = tiny_recipe(*inputs, changes | {"publish.address": str(tmp_path / "store")})
    done = pyflyte(recipe, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout + done.stderr
    step = r"^step (\d)/3  loss [\d.]+  grad [\d.]+  lr [\de.-]+  [\d,]+ tok/s  \d+\.\d GiB  eta \d+:\d\d$"
    assert re.findall(step, done.stdout, re.MULTILINE) == ["1", "2", "3"]
    training = (
        r"^trained 3 steps in \d+:\d\d  loss .*\nexports step 3 of 3: .*\ngate loss [\d.]+, nats per "
        r"token, of the first \d+"
    )
    assert re.search(training, done.stdout, re.MULTILINE)
    assert re.search(r"^held-out loss  base [\d.]+  tuned [\d.]+ nats per token$", done.stdout, re.MULTILINE)
    assert not re.search(r"\r|\x1b|[Ww]arning|WARN|Failed|\{'", said)
    (artifact,) = (tmp_path / "store").iterdir()
    files = {str(path.relative_to(artifact)) for path in artifact.rglob("*") if path.is_file()}
    records = {
        "recipe.yaml",
        "plan.json",
        "metrics.json",
        "training.json",
        "manifest.json",
        "report.html",
        "README.md",
    }
    assert records | {weights} <= files
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl"))]
    # The artifact is enough to run the recipe again.
    assert Recipe.from_yaml(artifact / "recipe.yaml") == Recipe.model_validate(recipe)
    plan = Plan.read(artifact / "plan.json")
    world_size = 2 if "zero2" in str(changes) else 1
    assert TrainingResult.read(artifact / "training.json").world_size == plan.world_size == world_size
    assert Metrics.read(artifact / "metrics.json").tuned.perplexity > 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # tests/tasks/test_errors.py tests the same in less time.
        pytest.param(
            {"training.learning_rat": 1},
            "training.learning_rat: unknown key; did you mean learning_rate?",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"method": "full", "sharding": "device_map"},
            "method full with sharding device_map",
            marks=pytest.mark.slow,
        ),
        ({"data.path": "none.jsonl"}, "none.jsonl"),
        ({"model.name_or_path": "./none"}, "no such folder"),
    ],
)
def test_bad_input_ends_in_one_clear_error_before_anything_is_trained(changes, said, inputs, tmp_path):
    done = pyflyte(tiny_recipe(*inputs, changes), tmp_path)
    assert done.returncode != 0
    assert said in done.stderr
    assert not re.search("Traceback|╭|heckpoints are", done.stdout + done.stderr)
    assert not list(tmp_path.rglob("*.parquet")), "nothing was prepared"


@pytest.mark.slow
def test_ranks_that_fail_for_one_cause_show_one_error(inputs, tmp_path):
    changes = {"sharding": "ddp", "hardware.shape": "cpu-2"}
    done = pyflyte(tiny_recipe(*inputs, changes), tmp_path, planted("nan 0,1 1"))
    assert done.returncode == 1
    assert re.search(r"^RunFailed: rank \d: bad loss: step 2: the loss is nan", done.stderr, re.MULTILINE)
    assert done.stderr.endswith("the run does not go on by itself\n")
    assert "Traceback" not in done.stdout + done.stderr


def test_prepared_data_is_cached_by_content(inputs, tmp_path, local_cache):
    base, rows = inputs
    copy = tmp_path / "pairs.jsonl"
    copy.write_bytes(rows.read_bytes())

    def prepared(**changes):
        recipe = Recipe.model_validate(tiny_recipe(base, copy, changes))
        request = DataRequest(model=recipe.model, data=recipe.data, fingerprint=data.fingerprint(recipe.data))
        return Path(prepare_data(request=request, scratch_folder=str(tmp_path / "keep")).path)

    first = prepared()
    assert prepared(**{"training.learning_rate": 1e-5, "evaluation.max_samples": 3}) == first, (
        "nothing that matters changed"
    )
    assert prepared(**{"data.max_length": 64}) != first
    copy.write_text(copy.read_text().replace("Question 1:", "Question one:"))
    assert prepared() != first, "the same path with other content"


@pytest.mark.filterwarnings(
    "ignore:Implicitly cleaning up:ResourceWarning"
)  # flytekit's, of a task that raised
def test_a_retry_continues_a_killed_attempt_and_leaves_nothing(
    inputs, tmp_path, local_cache, monkeypatch, caplog
):
    base, rows = inputs
    keep = tmp_path / "keep"
    caplog.set_level("INFO", logger="flytune")
    monkeypatch.setattr(shards, "SAMPLES_A_SHARD", 10)
    monkeypatch.setattr(mixture, "_CHUNK_ROWS", 8)

    def asked(path, **changes):
        recipe = Recipe.model_validate(tiny_recipe(base, path, changes))
        return DataRequest(model=recipe.model, data=recipe.data, fingerprint=data.fingerprint(recipe.data))

    save, saves = progress.save, []

    def killing(found, folder):
        save(found, folder)
        saves.append(found)
        if len(saves) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(progress, "save", killing)
        prepare_data(request=asked(rows), scratch_folder=str(keep))
    (left,) = keep.iterdir()
    assert len(list(left.glob("train/*.parquet"))) == 3
    folder = Path(prepare_data(request=asked(rows), scratch_folder=str(keep)).path)
    assert "resuming after" in caplog.text
    assert data.read_manifest(folder).rows == 80
    assert not list(keep.iterdir())
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nope\n")
    with pytest.raises(Exception, match=r"bad\.jsonl:1: not JSON"):
        prepare_data(request=asked(bad), scratch_folder=str(keep))
    assert not list(keep.iterdir())
    # A folder that cannot be created does not fail the task.
    (tmp_path / "file").touch()
    folder = Path(
        prepare_data(
            request=asked(rows, **{"data.seed": 5}), scratch_folder=str(tmp_path / "file" / "keep")
        ).path
    )
    assert data.read_manifest(folder).rows == 80
    assert "a retry of this attempt would start again" in caplog.text


def test_workers_of_a_node_download_once_and_see_whole_files(tmp_path, monkeypatch):
    downloads = []

    def download(flyte, address, target, is_folder):
        downloads.append((address, target, is_folder))
        (tmp_path / "local").mkdir()
        with (tmp_path / "local" / "x").open("wb") as file:
            for _ in range(20):
                file.write(b"0" * 100_000)
                file.flush()
                time.sleep(0.01)

    def worker(sizes):
        # Each worker has its own FlyteDirectory, as after unpickling.
        directory = FlyteDirectory(str(tmp_path / "local"), remote_directory=False)
        directory._remote_source = "s3://bucket/x"
        sizes.append((local(FLYTE, TYPES.to_stage(directory, Folder)) / "x").stat().st_size)

    monkeypatch.setattr(Flyte, "fetch", download)
    sizes = []
    workers = [threading.Thread(target=worker, args=(sizes,)) for _ in range(6)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    assert sizes == [2_000_000] * 6
    assert downloads == [("s3://bucket/x", tmp_path / "local", True)]


def test_a_missing_cached_folder_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match="clear the cache with `pyflyte local-cache clear`"):
        local(FLYTE, TYPES.to_stage(FlyteDirectory(str(tmp_path / "gone")), Folder))


def test_the_recipe_is_one_value_for_the_console():
    from flytekit.core.type_engine import TypeEngine

    schema = TypeEngine.to_literal_type(Recipe)
    assert json.loads(json.dumps(dict(schema.metadata)))["title"] == "Recipe"
