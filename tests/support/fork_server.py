"""Python programs that are forked from a process with the libraries of all stages, whose import is most of a
short pod's time.

The process has imported nothing of the project, which a program finds by its own PYTHONPATH. Of the variables
that libraries read when they are imported, pods differ in HF_HOME alone: the folder that the libraries use
instead is empty in each pod.
"""

import atexit
import ctypes
import functools
import gc
import importlib.util
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

LIBRARIES = (
    *(
        "flytekit.bin.entrypoint",
        "flytekitplugins.kfpytorch",
        "s3fs",
        "aiobotocore.session",
        "pandas",
        "pyarrow.parquet",
    ),
    *("torch.distributed.elastic.agent.server", "transformers.modeling_utils", "accelerate", "datasets"),
    *("transformers.integrations.deepspeed", "deepspeed", "trl.trainer.sft_trainer"),
)
_NEW_MOUNTS, _NEW_HOST_NAME, _NEW_PROCESSES = 0x00020000, 0x04000000, 0x20000000
"""Flags of unshare(2)."""
_PRIVATE, _NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = (1 << 18) | 16384, 2, 4, 8
"""Flags of mount(2); the first is MS_PRIVATE with MS_REC."""
_DEATH_SIGNAL = 1
"""Option of prctl(2)."""


class Program:
    """Program in a session of its own, as subprocess.Popen has it.

    Args:
        file: what the program runs. command: its name and arguments. host: name of the host in the program's
        own namespaces of processes and mounts; None for those of this process. has_parent: True if the
        program is not process 1 in its namespace, but its child. err: file for its standard error; that for
        its output by default.
    """

    def __init__(self, file, command, folder, environment, out, host=None, has_parent=False, err=None):
        asked = {"file": str(file), "command": command, "folder": str(folder), "environment": environment}
        asked |= {"host": host, "has_parent": has_parent}
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            socket.send_fds(
                start(), [json.dumps(asked).encode()], [other.fileno(), out.fileno(), (err or out).fileno()]
            )
        self.pid, self.returncode = int(self._channel.recv(16)), None

    def poll(self):
        """Return the exit code, negative for a signal; None while the program runs."""
        if self.returncode is None:
            try:
                self._end(self._channel.recv(16, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return None
        return self.returncode

    def wait(self, seconds=None):
        """Return the exit code once the program has ended.

        Raises:
            TimeoutError: it has not ended after that time.
        """
        if self.returncode is None:
            self._channel.settimeout(seconds)
            self._end(self._channel.recv(16))
        return self.returncode

    def _end(self, told):
        self.returncode = int(told or -signal.SIGKILL)
        self._channel.close()


def run(command, folder, environment):
    """Run a program with its arguments until it ends, as subprocess.run does that captures text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = Program(command[0], [*map(str, command)], folder, environment, out, err=err).wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


_CALL = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    function, arguments = pickle.load(file)
with open(sys.argv[2], "wb") as file:
    pickle.dump(function(*arguments), file)
"""


def call(function, *arguments):
    """Return what a function returns in such a program, which imports it from this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        program, asked, answer, log = (
            Path(folder, name) for name in ("program.py", "asked", "answer", "log")
        )
        program.write_text(_CALL)
        asked.write_bytes(pickle.dumps((function, arguments)))
        with log.open("wb") as out:
            environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
            code = Program(program, ["call", str(asked), str(answer)], folder, environment, out).wait()
        assert code == 0, log.read_text()
        return pickle.loads(answer.read_bytes())


_STARTING = threading.Lock()


def start():
    """Start the process if it has not been started, and return; it imports meanwhile."""
    with _STARTING:
        return _started()


@functools.cache
def _started():
    """Start the process, which ends with this one; return the socket by which it is asked."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Not those of the test that is the first to need it.
    own = ("HF_", "AWS_", "FLYTE", "TRANSFORMERS_", "FAULT", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environment |= {"HF_HOME": tempfile.mkdtemp(), "HF_HUB_OFFLINE": "1"}
    # -P: modules beside this file have names of libraries.
    command = [sys.executable, "-P", __file__, str(other.fileno())]
    process = subprocess.Popen(command, env=environment, pass_fds=[other.fileno()], stdout=subprocess.DEVNULL)
    other.close()
    atexit.register(process.wait)
    atexit.register(mine.close)
    return mine


def _serve(channel):
    gc.disable()
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    while True:
        asked, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not asked:
            return
        if os.fork() == 0:
            channel.close()
            _keep(socket.socket(fileno=descriptors[0]), descriptors[1:], **json.loads(asked))
        for descriptor in descriptors:
            os.close(descriptor)
        while _reaped():
            pass


def _reaped():
    try:
        return os.waitpid(-1, os.WNOHANG)[0]
    except ChildProcessError:
        return 0


def _keep(channel, out, file, command, folder, environment, host, has_parent):
    """Start the program below this process, send its exit code, and exit."""
    os.setsid()
    # The program's own, which is sent to the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel.send(str(os.getpid()).encode())
    if host is not None:
        _libc("unshare", _NEW_MOUNTS | _NEW_HOST_NAME | _NEW_PROCESSES)
        socket.sethostname(host)
    if (pid := os.fork()) == 0:
        channel.close()
        if host is not None:
            _libc("prctl", _DEATH_SIGNAL, signal.SIGKILL)
            _libc("mount", b"none", b"/", None, _PRIVATE, None)
            _libc("mount", b"proc", b"/proc", b"proc", _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS, None)
            _libc("mount", b"tmpfs", os.environ["HF_HOME"].encode(), b"tmpfs", _NO_SETUID | _NO_DEVICES, None)
        if has_parent and (child := os.fork()):
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os._exit(code if code >= 0 else 128 - code)
        _become(out, file, command, folder, environment)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    channel.send(str(code).encode())
    os._exit(0)


def _libc(name, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _become(out, file, command, folder, environment):
    """Run the program in this process, and end it."""
    import numpy as np
    from flytekit.configuration.file import get_config_file
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.interfaces.random import random

    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, one in enumerate(out, 1):
            os.dup2(one, number)
            os.close(one)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        tempfile.tempdir = None
        sys.stdout.reconfigure(line_buffering=bool(os.environ.get("PYTHONUNBUFFERED")))
        sys.argv = list(command)
        # As in a new process: the libraries would give all programs the same numbers, names, folders and
        # configuration.
        random.seed()
        np.random.seed()
        get_config_file.cache_clear()
        FlyteContextManager.initialize()
        # Not the folder of the file: it is one of this checkout.
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path_importer_cache.clear()
        sys.modules.pop("sitecustomize", None)
        if importlib.util.find_spec("sitecustomize"):
            importlib.import_module("sitecustomize")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = file
        with open(file, encoding="utf-8") as text:
            exec(compile(text.read(), file, "exec"), main.__dict__)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
        code = 1 if isinstance(error.code, str) else error.code or 0
    except BaseException:  # noqa: BLE001 (any error of a program goes to its output)
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
