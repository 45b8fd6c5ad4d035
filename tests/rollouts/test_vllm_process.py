"""vLLM's process: how it starts, what it is told, and that it ends with the trainer, however that ends.

Programs of a few lines stand for vLLM.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flytune.errors import EngineError
from flytune.rollouts import VllmProcess
from tests.support.paths import ROOT
from tests.support.waiting import until


@pytest.fixture
def started(tmp_path):
    """Return a function that starts a shell script in the place of vLLM."""
    processes = []

    def start(script):
        program, folder = tmp_path / "python", tmp_path / "weights"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        folder.mkdir()
        processes.append(VllmProcess(str(program), ["--model", "/base"], folder))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def test_a_server_that_does_not_start_is_named_with_the_end_of_its_log(started):
    process = started("echo ValueError: no room for the cache >&2; exit 3")
    said = "vLLM did not start: exit code 3; its log ends with: ValueError: no room for the cache"
    with pytest.raises(EngineError, match=said):
        process.wait(lambda: False, 600)


def test_an_interpreter_that_is_not_there_is_named(tmp_path):
    process = VllmProcess("/none/python", [], tmp_path / "weights")
    with pytest.raises(EngineError, match="No such file or directory: '/none/python'"):
        process.wait(lambda: False, 600)
    process.close()


def test_a_server_that_never_answers_has_a_limit(started):
    process = started("echo loading; exec sleep 600")
    until(lambda: "loading" in process.last_lines())
    with pytest.raises(EngineError, match=r"not answer within 0 s of its start: it runs; .* loading; raise"):
        process.wait(lambda: False, 0)


def test_a_server_gets_no_secrets_and_no_place_among_the_ranks(started, monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "RANK", "MASTER_ADDR", "FLYTUNE_API_KEY"):
        monkeypatch.setenv(name, "secret-of-the-run")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    process = started("env; exit 3")
    until(process.has_ended)
    said = process.last_lines()
    assert "VLLM_CPU_KVCACHE_SPACE=7" in said
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in said
    assert "secret-of-the-run" not in said


def test_its_key_is_in_no_argument(started, tmp_path):
    process = started(f'echo "$@" > {tmp_path}/arguments; exec sleep 600')
    until((tmp_path / "arguments").exists)
    until((tmp_path / "arguments").read_text)
    words = (tmp_path / "arguments").read_text()
    assert words.startswith("-m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port")
    assert process.key not in words


TRAINER = """
import sys
from pathlib import Path
from flytune.rollouts import VllmProcess
VllmProcess(sys.argv[1], [], Path(sys.argv[2]))
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_trainer_and_leaves_no_weights(tmp_path, number):
    program, pids = tmp_path / "python", tmp_path / "pids"
    # As vLLM, it has a process of its own that ignores requests to end.
    program.write_text(
        f"#!/bin/sh\ntrap '' TERM\n(trap '' TERM; sleep 600) &\necho $$ $! > {pids}.new\n"
        f"mv {pids}.new {pids}\nwait\n"
    )
    program.chmod(0o755)
    (tmp_path / "weights").mkdir()
    command = [sys.executable, "-c", TRAINER, str(program), str(tmp_path / "weights")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        until(pids.exists)
        trainer.send_signal(number)
        for pid in map(int, pids.read_text().split()):
            until(lambda pid=pid: not _runs(pid), f"the end of process {pid}")
        until(lambda: not (tmp_path / "weights").exists())


def _runs(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended before, or while its file was read
        return False
    # A process that has ended stays until its parent has seen it.
    return stat.rpartition(")")[2].split()[0] != "Z"
