"""Tests of a stored artifact's metadata, which the console shows on open-source Flyte and on Union."""

import base64
import json
from pathlib import Path

import pytest
from flyteidl.core import artifact_id_pb2, literals_pb2
from flytekit.core import utils
from flytekit.types.directory import FlyteDirectory

from flytune.data.shards import read_manifest
from flytune.evaluation import score
from flytune.pods import disk
from flytune.stages import stored
from flytune.storage import Storage
from tasks.base_model import fetch_base_model
from tasks.prepare import prepare_data
from tasks.runtime.orchestrator import FLYTE
from tasks.runtime.values import ARTIFACT
from tasks.store import store_artifact
from tests.support.pods import pod
from tests.support.registration import proto
from tests.support.reports import metrics
from tests.support.s3 import counted_bucket
from tests.support.stages import plan_for, recipe_for, write_dataset, write_trained
from tests.support.tiny import tiny_base


def test_the_output_is_declared_as_an_artifact():
    output = proto(store_artifact).interface.outputs.variables["o0"]
    assert output.artifact_partial_id.artifact_key.name == ARTIFACT.name == "flytune"
    assert set(output.artifact_partial_id.partitions.value) == {"recipe", "base_model", "data"}


@pytest.mark.parametrize(
    ("task", "disk"),
    [
        (store_artifact, disk.STORE_GIB),
        (prepare_data, disk.PREPARE_GIB),
        (fetch_base_model, disk.FETCH_BASE_GIB),
    ],
)
def test_pods_that_hold_files_request_their_disk(task, disk):
    assert task.resources.requests.ephemeral_storage == f"{disk}Gi"


def test_a_local_run_of_a_remote_model_gets_its_weights(tmp_path):
    source = Storage("memory://trained", "")
    source.filesystem.pipe("/trained/model/model.safetensors", b"weights")
    made = stored.store(FLYTE, tmp_path, {"model.safetensors": "model/model.safetensors"}, source)
    assert made.is_here
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.journey
def test_a_pod_stores_and_publishes_weights_that_do_not_pass_through_it(tmp_path):
    base = tiny_base(tmp_path)
    recipe = recipe_for(base, "full", **{"publish.address": "s3://models/published"})
    dataset = write_dataset(tmp_path / "dataset", base)
    trained = write_trained(tmp_path / "trained", recipe, dataset, steps=2)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tasks.json").write_text("[]")
    with counted_bucket() as server:
        s3 = Storage("s3://models")
        s3.filesystem.put(f"{trained}/", "models/raw/trained/", recursive=True)
        folders = {
            "dataset": dataset,
            "harness_data": tmp_path / "data",
            "trained": "s3://models/raw/trained",
        }
        inputs = {
            "metrics": metrics(),
            "answers": [],
            **{name: FlyteDirectory(str(at)) for name, at in folders.items()},
        }
        server.traffic.clear()
        made = pod(
            store_artifact,
            tmp_path / "store",
            raw="s3://models/raw/out",
            recipe=recipe,
            plan=plan_for(recipe),
            **inputs,
        )
        assert isinstance(made, dict), made.error.message
        weights = (trained / "model" / "model.safetensors").stat().st_size
        assert 0 < server.bytes_of("model.safetensors") < weights / 20  # headers and last bytes
        (published,) = s3.names("published")
        for copy in (Storage(made["o0"].remote_source), Storage(f"s3://models/published/{published}")):
            contents = json.loads(copy.read("artifact.json"))["files"]
            assert {file["file"]: copy.get(file["file"]) for file in contents} == {
                file["file"]: file["sha256"] for file in contents
            }
            assert copy.sizes("").keys() == {"artifact.json", *(file["file"] for file in contents)}
            assert "model.safetensors" in copy.names()


@pytest.mark.slow
def test_a_pod_s_output_says_what_it_is(tmp_path):
    base = tiny_base(tmp_path)
    recipe = recipe_for(base, "lora")
    dataset = write_dataset(tmp_path / "dataset", base)
    trained = write_trained(tmp_path / "trained", recipe, dataset, steps=2)
    scored = score.score(recipe, trained, dataset)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tasks.json").write_text("[]")
    folders = {"dataset": dataset, "trained": trained, "harness_data": tmp_path / "data"}
    inputs = {
        "metrics": scored,
        "answers": [],
        **{name: FlyteDirectory(str(folder)) for name, folder in folders.items()},
    }
    made = pod(store_artifact, tmp_path / "store", recipe=recipe, plan=plan_for(recipe), **inputs)
    assert isinstance(made, dict), made.error.message
    outputs = utils.load_proto_from_file(literals_pb2.LiteralMap, str(tmp_path / "store" / "outputs.pb"))
    kept = outputs.literals["o0"].metadata
    facts = json.loads(kept["flytune"])
    assert facts["recipe"] == "tiny"
    assert facts["base_model"] == str(base)
    content = read_manifest(dataset).content_sha256
    assert facts["data"] == content
    assert facts["version"].startswith("tiny-")
    assert facts["tuned_perplexity"] == scored.tuned.perplexity
    # Union's console reads this form.
    identity = artifact_id_pb2.ArtifactID.FromString(base64.b64decode(kept["_uap"]))
    assert identity.partitions.value["data"].static_value == content
    assert (Path(made["o0"].download()) / "report.html").is_file()
