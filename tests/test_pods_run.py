"""Tasks as a pod runs them: the container's own command (pyflyte-execute), inputs.pb in, outputs.pb out; no cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2, literals_pb2
from flytekit.core import utils
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.core.errors import ErrorDocument
from flytekit.models.literals import LiteralMap

from flytune.recipe import Recipe
from flytune.records import TrainingResult
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.train import TRAIN
from tests.test_tasks import SETTINGS
from tests.tiny import tiny_base, tiny_recipe, write_pairs

ROOT = Path(__file__).resolve().parent.parent


def pod(task, folder, raw=None, seen=None, **inputs):
    """Outputs of one task by name, or the error document that propeller would show in the console.

    `raw` is the cluster's storage for outputs, `seen` what else its environment has.
    """
    context = FlyteContextManager.current_context()
    folder.mkdir()
    literals = TypeEngine.dict_to_literal_map(context, inputs, task.python_interface.inputs)
    utils.write_proto_to_file(literals.to_flyte_idl(), str(folder / "inputs.pb"))
    places = {
        "{{.input}}": str(folder / "inputs.pb"),
        "{{.outputPrefix}}": str(folder),
        "{{.rawOutputDataPrefix}}": raw or str(folder / "raw"),
        "{{.checkpointOutputPrefix}}": str(folder / "checkpoint"),
        "{{.prevCheckpointPrefix}}": '""',
    }
    command = [places.get(part, part) for part in task.get_command(SETTINGS)]
    command[0] = str(Path(sys.executable).with_name(command[0]))
    environment = os.environ | {"HOME": str(folder), "TMPDIR": str(folder), **(seen or {})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    if (folder / "error.pb").exists():
        return ErrorDocument.from_flyte_idl(utils.load_proto_from_file(errors_pb2.ErrorDocument, str(folder / "error.pb")))
    assert (folder / "outputs.pb").exists(), done.stderr[-3000:]
    proto = utils.load_proto_from_file(literals_pb2.LiteralMap, str(folder / "outputs.pb"))
    return TypeEngine.literal_map_to_kwargs(context, LiteralMap.from_flyte_idl(proto), task.python_interface.outputs)


@pytest.fixture
def inputs(tmp_path):
    return tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64)


def test_plan_prepare_and_an_elastic_train_pod(inputs, tmp_path):
    recipe = Recipe.model_validate(tiny_recipe(*inputs, {"sharding": "zero2", "hardware.shape": "cpu-2"}))
    planned = pod(make_plan, tmp_path / "plan", recipe=recipe)
    assert planned["route"] == planned["shape"] == "cpu-2"
    dataset = pod(prepare_data, tmp_path / "prepare", request=planned["request"], keep=planned["keep"])["o0"]
    trained = pod(TRAIN["cpu-2"], tmp_path / "train", recipe=recipe, plan=planned["plan"], dataset=dataset)["o0"]
    folder = Path(trained.download())
    assert TrainingResult.read(folder / "training.json").world_size == 2
    assert (folder / "model" / "model.safetensors").is_file()


def test_a_pod_s_error_reaches_the_console_in_our_words(inputs, tmp_path):
    recipe = Recipe.model_validate(tiny_recipe(*inputs, {"method": "full", "sharding": "device_map"}))
    error = pod(make_plan, tmp_path / "plan", recipe=recipe).error
    assert "method full with sharding device_map: a 16-bit model spread by layers" in error.message
