"""Test of an element of the mapped harness task in a simulated pod (pyflyte-map-execute)."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from flyteidl.core import literals_pb2
from flytekit import map_task
from flytekit.core import utils
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import LiteralMap
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.evaluation import tasks as evaluation_tasks
from flytune.evaluation.task_kind import JobResult
from tasks.harness import EVALUATE_TASKS
from tests.support.harness import asking
from tests.support.paths import ROOT
from tests.support.registration import SETTINGS
from tests.support.stages import write_dataset, write_trained


def write_marker(folder):
    folder.mkdir()
    (folder / "marker.json").write_text("{}")
    return folder


@pytest.mark.slow
def test_a_pod_answers_the_job_of_its_index(base, own, tmp_path):
    recipe = asking(base, own, ["choose"], task_shards=2)
    trained = write_trained(tmp_path / "trained", recipe, write_dataset(tmp_path / "dataset", base))
    jobs = evaluation_tasks.jobs(recipe)
    folders = {
        "trained": trained,
        "base": write_marker(tmp_path / "base"),
        "harness_data": write_marker(tmp_path / "data"),
    }
    shared = {"recipe": recipe, **{name: FlyteDirectory(str(folder)) for name, folder in folders.items()}}
    mapped = map_task(partial(EVALUATE_TASKS["cpu-1"], **shared))
    context = FlyteContextManager.current_context()
    given = {"job": jobs, **shared}
    literals = TypeEngine.dict_to_literal_map(context, given, mapped.python_interface.inputs)
    utils.write_proto_to_file(literals.to_flyte_idl(), str(tmp_path / "inputs.pb"))
    places = {
        "{{.input}}": str(tmp_path / "inputs.pb"),
        "{{.outputPrefix}}": str(tmp_path),
        "{{.rawOutputDataPrefix}}": str(tmp_path / "raw"),
        "{{.checkpointOutputPrefix}}": str(tmp_path / "checkpoint"),
        "{{.prevCheckpointPrefix}}": '""',
    }
    command = [places.get(part, part) for part in mapped.get_command(SETTINGS)]
    assert command[0] == "pyflyte-map-execute"
    command[0] = str(Path(sys.executable).with_name(command[0]))
    number = {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "NUMBER", "NUMBER": "1"}
    environment = os.environ | number | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert (tmp_path / "outputs.pb").exists(), done.stderr[-3000:]
    proto = utils.load_proto_from_file(literals_pb2.LiteralMap, str(tmp_path / "outputs.pb"))
    (answers,) = TypeEngine.literal_map_to_kwargs(
        context, LiteralMap.from_flyte_idl(proto), {"o0": FlyteFile}
    ).values()
    result = JobResult.read(Path(answers.download()))
    assert result.job == jobs[1]
    assert {int(key.split()[1]) % 2 for key in result.base} == {1}
