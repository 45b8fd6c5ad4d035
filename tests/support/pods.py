"""Simulated pods: a task's container command (pyflyte-execute) with inputs.pb and outputs.pb, without a
cluster."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from flyteidl.core import errors_pb2
from flytekit.core import utils
from flytekit.models.core.errors import ErrorDocument

from tests.chaos.pods import SETTINGS, fill_command, outputs, write_inputs
from tests.support.fork_server import Program
from tests.support.paths import ROOT


class PodKilled(Exception):
    """Error of a pod whose main process was killed and left neither outputs nor an error."""


def pod(task, folder, raw=None, seen=None, forks=False, **inputs):
    """Return the outputs of one task by name, or the error document that the console would show.

    Args:
        raw: storage for outputs.
        seen: additional environment variables.
        forks: True for a pod that begins with its libraries (fork_server.py).
    """
    folder.mkdir()
    write_inputs(task, folder / "inputs.pb", inputs)
    command = fill_command(task.get_command(SETTINGS), str(folder / "inputs.pb"), str(folder), raw)
    command[0] = str(Path(sys.executable).with_name(command[0]))
    own = {"HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
    environment = os.environ | own | (seen or {})
    log = folder / "log"
    with log.open("wb") as out:
        if forks:
            code = Program(command[0], command, ROOT, environment, out).wait()
        else:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=out, stderr=out, timeout=540
            ).returncode
    if (folder / "error.pb").exists():
        return ErrorDocument.from_flyte_idl(
            utils.load_proto_from_file(errors_pb2.ErrorDocument, str(folder / "error.pb"))
        )
    if code == -signal.SIGKILL:
        raise PodKilled
    assert (folder / "outputs.pb").exists(), log.read_text()[-3000:]
    return outputs(task, folder)
