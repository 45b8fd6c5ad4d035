"""The kernel's walls around rewards, each by itself and without the audit hook: what one stops works where it
is not up."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flytune.errors import RecipeError, RewardError
from flytune.planning import planner
from flytune.recipe import Grpo, Recipe
from flytune.rewards import Judged, RewardProcess, process, walls
from tests.support.plans import GEOMETRY
from tests.support.recipes import content

pytestmark = pytest.mark.skipif(
    walls.missing() is not None, reason=f"the kernel has no walls: {walls.missing()}"
)
FILES, CALLS = "restrict_files", "filter_calls"

ATTACKS = {
    "opens a file": (FILES, "os.open(secret, os.O_RDONLY)"),
    "opens a file by a folder": (
        FILES,
        "inside = os.open(os.path.dirname(os.__file__), os.O_RDONLY)\n"
        "os.open(os.path.relpath(secret, os.path.dirname(os.__file__)), os.O_RDONLY, dir_fd=inside)",
    ),
    "lists a folder": (FILES, "os.listdir(os.path.dirname(secret))"),
    "writes a file": (FILES, "os.open(secret + '.new', os.O_WRONLY | os.O_CREAT)"),
    "makes a folder": (FILES, "os.mkdir(secret + '.folder')"),
    "renames a file": (FILES, "os.rename(secret, secret + '.other')"),
    "removes a file": (FILES, "os.unlink(secret)"),
    "empties a file": (FILES, "os.truncate(secret, 0)"),
    "reads another process's environment": (FILES, "os.open(f'/proc/{os.getppid()}/environ', os.O_RDONLY)"),
    "connects": (
        FILES,
        "import socket\nlistening = socket.socket()\nlistening.listen()\n"
        "socket.create_connection(('127.0.0.1', listening.getsockname()[1]))",
    ),
    "makes a socket": (CALLS, "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)"),
    "makes a pair of sockets": (CALLS, "import socket\nsocket.socketpair()"),
    "forks": (CALLS, "os.fork() or os._exit(0)"),
    "starts a program": (
        CALLS,
        "os.execv(sys.executable, [sys.executable, '-c', 'import os; os.write(1, b\"done\")'])",
    ),
    "traces a process": (CALLS, "assert libc.ptrace(0x4206, victim, None, None) == 0"),
    "reads another process's memory": (
        CALLS,
        "text = ctypes.create_string_buffer(8)\n"
        "mine, theirs = (Part * 1)(Part(ctypes.addressof(text), 8)), (Part * 1)(Part(ctypes.addressof(mark), "
        "8))\n"
        "assert libc.process_vm_readv(victim, mine, 1, theirs, 1, 0) == 8",
    ),
    "signals another process": (CALLS, "os.kill(victim, 0)"),
    "signals another process's thread": (CALLS, "assert libc.tgkill(victim, victim, 0) == 0"),
    "limits another process": (CALLS, "resource.prlimit(victim, resource.RLIMIT_CPU, (9, 9))"),
    "takes another process's files": (CALLS, "os.pidfd_open(victim)"),
    "makes a file in memory": (CALLS, "os.memfd_create('x')"),
    "leaves its namespace": (CALLS, "assert libc.unshare(0x04000000) == 0"),
    "rings the kernel for others to work": (
        CALLS,
        "assert libc.syscall(425, 1, ctypes.create_string_buffer(128)) >= 0",
    ),
}
"""The wall that stops it, and Python that does it."""
_BEFORE = """
import ctypes, importlib.util, os, resource, sys
import signal, socket
walls = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("walls", sys.argv[1]))
spec.loader.exec_module(walls)
libc, mark, secret = ctypes.CDLL(None), ctypes.create_string_buffer(b"a secret", 8), sys.argv[2]
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
gone, held = os.pipe()
victim = os.fork()
if not victim:
    libc.prctl(1, 9)
    os.close(held)
    os.read(gone, 1)
    os._exit(0)
"""


def attempt(code, tmp_path, *put_up):
    """Return whether Python could do it behind some walls alone."""
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    lines = ["walls.forbid_privileges()", *(f"walls.{one}()" for one in put_up)]
    body = textwrap.indent(code, "    ")
    end = "except (OSError, AssertionError):\n    os._exit(7)\nos.write(1, b'done')"
    script = "\n".join([_BEFORE, *lines, "try:", body, end])
    done = subprocess.run(
        [sys.executable, "-c", script, walls.__file__, str(secret)], capture_output=True, timeout=300
    )
    if done.returncode == 7:
        return False
    assert done.stdout.startswith(b"done"), done.stderr.decode()
    return True


@pytest.mark.parametrize("name", ATTACKS)
def test_each_wall_alone_stops_what_works_without_it(name, tmp_path):
    wall, code = ATTACKS[name]
    assert attempt(code, tmp_path)
    assert not attempt(code, tmp_path, wall)


def test_python_and_its_libraries_work_behind_all_walls(tmp_path):
    works = (
        "import numpy, threading, json, decimal, datetime, zoneinfo\n"
        "assert numpy.ones(3).sum() == 3\n"
        "thread = threading.Thread(target=lambda: None)\nthread.start()\nthread.join()\n"
        "assert open(os.__file__).read() and os.listdir(os.path.dirname(os.__file__))\n"
        "assert os.urandom(4) and sys.stdout.isatty() is False"
    )
    assert attempt(works, tmp_path, "put_up")


def test_the_memory_of_the_run_is_hidden_from_processes_of_the_same_user(tmp_path):
    code = """
walls.hide_memory({hidden})
reader = os.fork()
if not reader:
    try:
        os.open(f"/proc/{{os.getppid()}}/environ", os.O_RDONLY)
    except OSError:
        os._exit(3)
    os._exit(0)
assert os.waitpid(reader, 0)[1] == 0"""
    # A process of root may read all.
    user = "if os.getuid() == 0:\n    os.setgid(10001)\n    os.setuid(10001)\n"
    assert attempt(user + code.format(hidden=False), tmp_path)
    assert not attempt(user + code.format(hidden=True), tmp_path)


def test_a_run_hides_its_memory_while_it_has_a_process_of_rewards():
    import ctypes

    def is_shown():
        return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)

    before = is_shown()
    with RewardProcess(Grpo(name="grpo")) as rewards:
        rewards.values([Judged("p", "7", {"answer": "7"}, "")])
        assert (before, is_shown()) == (1, 0)
    assert is_shown() == 1


READS = """
def own(completion, **columns):
    import os
    place = os.path.dirname(os.__file__)
    os.chdir(place)
    inside = os.open(place, os.O_RDONLY)
    return len(os.read(os.open(os.path.relpath({secret!r}, place), os.O_RDONLY, dir_fd=inside), 99))
"""


HOOK, WALLS = "    _watch()\n\n\ndef _limit", "        walls.put_up()\n    _watch()"
"""Lines of worker.py that put up the two."""


def without(worker, folder, monkeypatch, *lines):
    """Let the process of rewards be one without some lines of its program."""
    shutil.copytree(worker.parent, folder)
    text = (folder / "worker.py").read_text(encoding="utf-8")
    for line in lines:
        assert text.count(line) == 1, line
        text = text.replace(
            line,
            line.replace("walls.put_up()", "pass") if line == WALLS else line.replace("_watch()", "pass"),
        )
    (folder / "worker.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(process, "_WORKER", folder / "worker.py")


def test_rewards_are_behind_the_walls_without_the_audit_hook_and_behind_the_hook_without_them(
    tmp_path, monkeypatch
):
    worker = process._WORKER
    (tmp_path / "secret").write_text("a secret", encoding="utf-8")
    code = READS.format(secret=str(tmp_path / "secret"))
    section = Grpo.model_validate({"name": "grpo", "rewards": [{"name": "own", "code": code}]})

    def value():
        with RewardProcess(section) as rewards:
            return rewards.values([Judged("p", "a", {}, "row 1")])

    for name, removed, said in (("hook", HOOK, "Permission denied"), ("walls", WALLS, "may read no file")):
        without(worker, tmp_path / name, monkeypatch, removed)
        with pytest.raises(RewardError, match=f"PermissionError: .*{said}"):
            value()
    without(worker, tmp_path / "both", monkeypatch, WALLS, HOOK)
    assert value() == [[8.0]]


def test_without_walls_answers_run_only_where_the_recipe_accepts_it_and_the_plan_says_so(
    tmp_path, monkeypatch
):
    folder = shutil.copytree(Path(process.__file__).parent, tmp_path / "rewards")
    text = (folder / "walls.py").read_text(encoding="utf-8")
    # A kernel without Landlock answers the number of another call that it does not have.
    (folder / "walls.py").write_text(text.replace("= 444, 445, 446", "= 9444, 9445, 9446"), encoding="utf-8")
    monkeypatch.setattr(process, "_WORKER", folder / "worker.py")
    item = Judged("p", "def f(): return 1", {"tests": "assert f() == 1"}, "row 1")

    def values(**accepted):
        with RewardProcess(
            Grpo.model_validate({"name": "grpo", "rewards": [{"name": "unit_tests", **accepted}]})
        ) as rewards:
            return rewards.values([item])

    with pytest.raises(
        RewardError,
        match=r"code of answers would run for unit_tests.*no Landlock.*accept_no_wall: true beside its name",
    ):
        values()
    assert values(accept_no_wall=True) == [[1.0]]

    monkeypatch.setattr(walls, "_CREATE_RULESET", 9444)
    lines = {
        "exact_answer": [],
        "unit_tests": [
            "unit_tests: this machine's kernel has no walls around their code (the kernel has no Landlock"
        ],
    }
    for name, wanted in lines.items():
        recipe = Recipe.model_validate(content(method="lora", objective={"name": "grpo", "rewards": [name]}))
        said = [
            line
            for line in planner.make(recipe, geometry=GEOMETRY).reasons
            if line.startswith("objective.rewards")
        ]
        assert len(said) == len(wanted)
        assert all(one in line for one, line in zip(wanted, said, strict=True))
    with pytest.raises(RecipeError, match="accept_no_wall: only for unit_tests"):
        Recipe.model_validate(
            content(objective={"name": "grpo", "rewards": [{"name": "exact_answer", "accept_no_wall": True}]})
        )
