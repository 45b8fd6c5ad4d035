"""Tests of a stored artifact's metadata, which the console shows on open-source Flyte and on Union."""

import base64
import json
from pathlib import Path

import pytest
from flyteidl.core import artifact_id_pb2, literals_pb2
from flytekit.core import utils
from flytekit.types.directory import FlyteDirectory

from flytune.evaluation import score
from tasks.store import ARTIFACT, store_artifact
from tests.support.pods import pod
from tests.support.registration import proto
from tests.support.stages import plan_for, recipe_for, write_dataset, write_trained
from tests.support.tiny import tiny_base


def test_the_output_is_declared_as_an_artifact():
    output = proto(store_artifact).interface.outputs.variables["o0"]
    assert output.artifact_partial_id.artifact_key.name == ARTIFACT.name == "flytune"
    assert set(output.artifact_partial_id.partitions.value) == {"recipe", "base_model", "data"}


@pytest.mark.slow
def test_a_pod_s_output_says_what_it_is(tmp_path):
    base = tiny_base(tmp_path)
    recipe = recipe_for(base, "lora")
    dataset = write_dataset(tmp_path / "dataset", base)
    trained = write_trained(tmp_path / "trained", recipe, dataset, steps=2)
    metrics = score.score(recipe, trained, dataset)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tasks.json").write_text("[]")
    folders = {"dataset": dataset, "trained": trained, "harness_data": tmp_path / "data"}
    inputs = {"metrics": metrics, "answers": [], **{name: FlyteDirectory(str(folder)) for name, folder in folders.items()}}
    made = pod(store_artifact, tmp_path / "store", recipe=recipe, plan=plan_for(recipe), **inputs)
    assert isinstance(made, dict), made.error.message
    outputs = utils.load_proto_from_file(literals_pb2.LiteralMap, str(tmp_path / "store" / "outputs.pb"))
    kept = outputs.literals["o0"].metadata
    facts = json.loads(kept["flytune"])
    assert facts["recipe"] == "tiny"
    assert facts["base_model"] == str(base)
    assert facts["data"] == "1" * 64
    assert facts["version"].startswith("tiny-")
    assert facts["tuned_perplexity"] == metrics.tuned.perplexity
    # Union's console reads this form.
    identity = artifact_id_pb2.ArtifactID.FromString(base64.b64decode(kept["_uap"]))
    assert identity.partitions.value["data"].static_value == "1" * 64
    assert (Path(made["o0"].download()) / "report.html").is_file()
