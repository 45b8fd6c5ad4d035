"""Tasks as a pod runs them: the container's own command (pyflyte-execute), inputs.pb in, outputs.pb out; no cluster."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from flyteidl.core import errors_pb2
from flytekit.core import utils
from flytekit.models.core.errors import ErrorDocument

from tests.chaos.pods import SETTINGS, filled, outputs, write_inputs
from tests.support.paths import ROOT


class PodKilled(Exception):
    """Its main process was, and left neither outputs nor an error."""


def pod(task, folder, raw=None, seen=None, **inputs):
    """Outputs of one task by name, or the error document that propeller would show in the console.

    `raw` is the cluster's storage for outputs, `seen` what else its environment has.
    """
    folder.mkdir()
    write_inputs(task, folder / "inputs.pb", inputs)
    command = filled(task.get_command(SETTINGS), str(folder / "inputs.pb"), str(folder), raw)
    command[0] = str(Path(sys.executable).with_name(command[0]))
    own = {"HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
    environment = os.environ | own | (seen or {})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    if (folder / "error.pb").exists():
        return ErrorDocument.from_flyte_idl(utils.load_proto_from_file(errors_pb2.ErrorDocument, str(folder / "error.pb")))
    if done.returncode == -signal.SIGKILL:
        raise PodKilled
    assert (folder / "outputs.pb").exists(), done.stderr[-3000:]
    return outputs(task, folder)
