"""Simulated train pod: the container's command in its own process group."""

import os
import re
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from flyteidl.core import errors_pb2, literals_pb2
from flytekit.bin.entrypoint import execute_task_cmd
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core import utils
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.interfaces.random import random
from flytekit.models.core.errors import ContainerError
from flytekit.models.literals import LiteralMap

from flytune.failures.table import RETRIES
from tests.support.paths import ROOT

SETTINGS = SerializationSettings(
    project="p",
    domain="d",
    version="v",
    image_config=ImageConfig(default_image=Image(name="default", fqn="i", tag="t")),
)


def write_inputs(task: Any, file: Path, inputs: dict[str, Any]) -> None:
    """Write inputs.pb, as propeller does."""
    # Without it, forked processes would copy folders to the same random address, each while another reads it.
    random.seed()
    context = FlyteContextManager.current_context()
    literals = TypeEngine.dict_to_literal_map(context, inputs, task.python_interface.inputs)
    utils.write_proto_to_file(literals.to_flyte_idl(), str(file))


def fill_command(
    command: list[str], inputs: str, prefix: str, raw: str | None = None, previous: str = '""'
) -> list[str]:
    """Return a container's command with propeller's addresses: below `prefix`, except those of `inputs` and
    `raw`.

    `previous` is the checkpoint folder of the previous attempt.
    """
    places = {
        "{{.input}}": inputs,
        "{{.outputPrefix}}": prefix,
        "{{.rawOutputDataPrefix}}": raw or f"{prefix}/raw",
        "{{.checkpointOutputPrefix}}": f"{prefix}/checkpoint",
        "{{.prevCheckpointPrefix}}": previous,
    }
    return [places.get(part, part) for part in command]


class Pod:
    """One attempt. `cold` starts a new interpreter, as a container does; otherwise this process is forked
    with its imports."""

    def __init__(self, task: Any, inputs: Path, folder: Path, number: int, cold: bool) -> None:
        self.folder, self.started = folder, time.monotonic()
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        command = fill_command(task.get_command(SETTINGS), str(inputs), str(folder))
        # After the last retry, a user has to start a new execution.
        environment = {
            "HOME": str(folder),
            "TMPDIR": str(self.temporary),
            "FLYTE_ATTEMPT_NUMBER": str(number % (RETRIES + 1)),
        }
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_pod(command, environment, folder / "log", cold, task)
        self._is_reaped = False

    def has_ended(self) -> bool:
        """Return True if the main process has ended."""
        if not self._is_reaped:
            self._is_reaped = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return self._is_reaped

    def members(self) -> dict[int, int]:
        """Return the parents of the pod's live processes, by process id."""
        members = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent, group = stat.read_text().rpartition(")")[2].split()[:3]
            except OSError:  # the process has ended
                continue
            if int(group) == self.pid and state != "Z":
                members[int(stat.parent.name)] = int(parent)
        return members

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks: the main process's children; none if it trains itself."""
        children = [pid for pid, parent in self.members().items() if parent == self.pid]
        ranks = []
        for pid in children:
            with suppress(OSError):  # the process has ended
                if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    ranks.append(pid)
        return ranks

    def send(self, number: int) -> None:
        """Send a signal to all processes."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    def kill(self) -> None:
        """Kill all processes; return when they have ended."""
        deadline = time.monotonic() + 30
        while self.members() and time.monotonic() < deadline:
            self.send(signal.SIGKILL)
            time.sleep(0.01)
        self.has_ended()

    def error(self) -> tuple[bool, str] | None:
        """Return whether Flyte would start another attempt, and the console's message; None without an
        error."""
        file = self.folder / "error.pb"
        if not file.exists():
            return None
        error = utils.load_proto_from_file(errors_pb2.ErrorDocument, str(file)).error
        return error.kind == ContainerError.Kind.RECOVERABLE, error.message

    def log_end(self) -> str:
        """Return the end of the log."""
        text = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)[-1500:]

    def has_outputs(self) -> bool:
        """Return True if the pod has stored outputs."""
        return (self.folder / "outputs.pb").exists()


def outputs(task: Any, folder: Path) -> dict[str, Any]:
    """Return a pod's outputs by name."""
    context = FlyteContextManager.current_context()
    proto = utils.load_proto_from_file(literals_pb2.LiteralMap, str(folder / "outputs.pb"))
    literals = LiteralMap.from_flyte_idl(proto)
    found: dict[str, Any] = TypeEngine.literal_map_to_kwargs(context, literals, task.python_interface.outputs)
    return found


def output(task: Any, folder: Path) -> Path:
    """Return the output folder of a train pod."""
    return Path(outputs(task, folder)["o0"].download())


def _run_pod(command: list[str], environment: dict[str, str], log: Path, cold: bool, task: Any) -> None:
    code = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(ROOT)
        os.environ.update(environment)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if cold:
            os.environ["PYTHONPATH"] = str(ROOT)
            os.execv(Path(sys.executable).with_name(command[0]), command)
        tempfile.tempdir = None
        # Without it, forked pods would use the same names for downloads in one folder.
        random.seed()
        if hasattr(task.task_config, "start_method"):
            task.task_config.start_method = "fork"
        sys.argv = command
        execute_task_cmd.main(command[1:], command[0])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 (any error of a pod goes to its log)
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the parent's exit functions must not run here.
        os._exit(code)
