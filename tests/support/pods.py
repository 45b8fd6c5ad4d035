"""Simulated pods: a task's container command (pyflyte-execute) with inputs.pb and outputs.pb, without a cluster."""

import os
import runpy
import signal
import subprocess
import sys
import warnings
from pathlib import Path

from flyteidl.core import errors_pb2
from flytekit.core import utils
from flytekit.models.core.errors import ErrorDocument

from flytune.training import libraries
from tests.chaos.pods import SETTINGS, Pod, fill_command, outputs, write_inputs
from tests.support import faults
from tests.support.paths import ROOT
from tests.support.waiting import until


class PodKilled(Exception):
    """Error of a pod whose main process was killed and left neither outputs nor an error."""


def pod(task, folder, raw=None, seen=None, **inputs):
    """Return the outputs of one task by name, or the error document that the console would show.

    Args:
        raw: storage for outputs.
        seen: additional environment variables.
    """
    folder.mkdir()
    write_inputs(task, folder / "inputs.pb", inputs)
    command = fill_command(task.get_command(SETTINGS), str(folder / "inputs.pb"), str(folder), raw)
    command[0] = str(Path(sys.executable).with_name(command[0]))
    own = {"HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
    environment = os.environ | own | (seen or {})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    return _ended(task, folder, done.returncode, done.stderr)


def forked_pod(task, folder, **inputs):
    """Return the same of a pod that is forked from this process, with its imports and variables, and the fault of FAULT."""
    attempt = os.environ["FLYTE_ATTEMPT_NUMBER"]

    def begin():
        warnings.resetwarnings()  # for pytest they are errors
        os.environ["FLYTE_ATTEMPT_NUMBER"] = attempt
        runpy.run_path(faults.__path__[0] + "/sitecustomize.py")

    libraries.import_before_fork(has_gpu=False, objectives=["sft"])
    folder.mkdir()
    write_inputs(task, folder / "inputs.pb", inputs)
    forked = Pod(task, folder / "inputs.pb", folder, 0, cold=False, begin=begin)
    until(forked.has_ended)
    return _ended(task, folder, forked.code, forked.log_end())


def _ended(task, folder, code, said):
    if (folder / "error.pb").exists():
        return ErrorDocument.from_flyte_idl(utils.load_proto_from_file(errors_pb2.ErrorDocument, str(folder / "error.pb")))
    if code == -signal.SIGKILL:
        raise PodKilled
    assert (folder / "outputs.pb").exists(), said[-3000:]
    return outputs(task, folder)
