"""vLLM and llama.cpp's server, started for one case and ended after it."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SECONDS = 900.0
"""Time after which a server that does not answer is given up."""
_VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_VLLM_OPTIONS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]


@contextmanager
def vllm(python: Path, words: Sequence[str], log: Path) -> Iterator[str]:
    """Start vLLM's server with these arguments, and yield its address. Its `vllm` looks for a package of that
    name."""
    port = _free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), *_VLLM_OPTIONS, *words]
    with _running(command, os.environ | _VLLM, log, port) as address:
        yield address


@contextmanager
def llama_server(source: Path, words: Sequence[str], log: Path) -> Iterator[str]:
    """Start llama.cpp's server with these arguments, and yield its address."""
    port = _free_port()
    command = [str(source / "build/bin/llama-server"), "--host", "127.0.0.1", "--port", str(port)]
    with _running([*command, *words], dict(os.environ), log, port) as address:
        yield address


@contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path, port: int) -> Iterator[str]:
    address = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(process, address, log)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    """Wait until a server answers; RuntimeError if it ends, or never does."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError(f"the server does not answer: {log.read_text(errors='replace')[-3000:]}")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
