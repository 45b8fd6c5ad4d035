"""The process that computes rewards: a script that reads batches as lines of JSON and answers each with one line.

It is started without the environment of its parent. Each reward computes a batch in a forked process, so that nothing is left
behind for the next batch; that process is ended where one item takes too long. Forked processes have limits of processor time,
memory and files, no network, and may neither write files nor start programs. This stops mistakes and what models usually
write; it is not a wall against a person who wants to break out (docs/security.md).

It runs by its path, and imports nothing but Python's own library and shipped.py beside it.
"""

import _posixsubprocess
import contextlib
import ctypes
import importlib.util
import json
import math
import os
import resource
import select
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY = 512 * 2**20
"""Bytes that a reward may take beside what the process has already."""
_LONGEST = 2**20
"""Bytes of a line in which a process answers for an item; an error has 300 characters."""
_FORGED = "writes into the answers of its process"
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
"""Options of unshare (Linux's sched.h)."""
_NO_NEW_PRIVILEGES, _DEATH_SIGNAL = 38, 1
"""Options of prctl (Linux's sys/prctl.h)."""
_REFUSED = (
    "socket.", "subprocess.", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.fork", "os.forkpty", "os.remove",
    "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.kill",
    "shutil.", "ctypes.", "pty.", "ftplib.", "smtplib.", "urllib.", "http.", "signal.",
    "sqlite3.", "webbrowser.",
)  # fmt: skip
"""Beginnings of the events (docs.python.org/3/library/audit_events.html) that no reward may cause."""


def main() -> None:
    """Answer batches until the input ends."""
    _leave_network()
    shipped = _module_of(Path(__file__).with_name("shipped.py"))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "r+", encoding="utf-8") as null:
        os.dup2(null.fileno(), 1)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps([_batch(reward, request, shipped) for reward in request["rewards"]]) + "\n")
        answers.flush()


def _batch(reward: dict[str, Any], request: dict[str, Any], shipped: Any) -> list[dict[str, Any]]:
    """Return the value, or the error, of each item; what follows an error is not computed."""
    items, seconds = request["items"], float(request["seconds"])
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        try:
            _compute(reward, items, seconds, write, shipped)
        finally:
            os._exit(1)
    os.close(write)
    found: list[dict[str, Any]] = []
    left = b""
    until = time.monotonic() + seconds + 1
    with contextlib.closing(os.fdopen(read, "rb", 0)) as pipe:
        while len(found) < len(items):
            left_seconds = until - time.monotonic()
            if left_seconds < 0 or not select.select([pipe], [], [], left_seconds)[0]:
                found.append({"error": f"takes more than {seconds:g} s"})
                break
            content = pipe.read(2**16)
            if not content:
                found.append({"error": _end_of(pid, seconds)})
                pid = 0
                break
            *lines, left = (left + content).split(b"\n")
            found += [_answer_of(one) for one in (*lines, *[b""] * (len(left) > _LONGEST))]
            until = time.monotonic() + seconds + 1 if lines else until
            if len(found) > len(items):
                found = [{"error": _FORGED}]
            if (wrong := next((at for at, one in enumerate(found) if "error" in one), None)) is not None:
                del found[wrong + 1 :]
                break
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def _answer_of(line: bytes) -> dict[str, Any]:
    """Return what a process has written of an item; code that finds the pipe can write anything."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if isinstance(found, dict) and (isinstance(found.get("value"), float) or isinstance(found.get("error"), str)):
        return found
    return {"error": _FORGED}


def _end_of(pid: int, seconds: float) -> str:
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return f"takes more than {seconds:g} s, or more memory than there is"
    return f"ends its process ({'signal ' + str(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else 'it exits'})"


def _compute(reward: dict[str, Any], items: list[dict[str, Any]], seconds: float, write: int, shipped: Any) -> None:
    """Write a line for each item. Runs in a forked process."""
    os.setpgid(0, 0)
    # It reads nothing, and has no way to those that read its process's answers.
    os.dup2(1, 0)
    _close_all_but(write)
    _limit(len(items) * seconds + 1)
    is_program = reward["code"] is None and reward["name"] == "unit_tests"
    if not is_program:
        _watch()
    try:
        function = _function_of(reward, shipped, seconds)
    except BaseException as error:  # noqa: BLE001 (a file may raise any)
        os.write(write, json.dumps({"error": f"the file cannot be read as Python: {_said(error)}"}).encode() + b"\n")
        return
    for item in items:
        try:
            line = _value(function(item))
        except MemoryError:
            line = {"error": f"takes more than {MEMORY // 2**20} MiB of memory"}
        except BaseException as error:  # noqa: BLE001 (a reward may raise any)
            line = {"error": f"raises {_said(error)}"}
        os.write(write, json.dumps(line).encode() + b"\n")


def _value(value: Any) -> dict[str, Any]:
    # numpy's numbers have it too.
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, bool | int | float):
        return {"error": f"returns {type(value).__name__} {value!r:.60}; it must return a number"}
    if not math.isfinite(found := float(number)):
        return {"error": f"returns {found}; it must return a finite number"}
    return {"value": found}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _function_of(reward: dict[str, Any], shipped: Any, seconds: float) -> Callable[[dict[str, Any]], Any]:
    """Return the function of an item: {prompt, completion, fields}."""
    name, column = reward["name"], reward["column"]
    if reward["code"] is not None:
        module = types.ModuleType("rewards")
        exec(compile(reward["code"], "rewards.py", "exec"), module.__dict__)
        own = getattr(module, name, None)
        if not callable(own):
            raise NameError(f"it has no function {name}")
        return lambda item: own(item["completion"], prompt=item["prompt"], **item["fields"])
    if name == "regular_expression":
        return lambda item: shipped.regular_expression(item["completion"], reward["pattern"])

    def of_column(item: dict[str, Any]) -> Any:
        if column not in item["fields"]:
            raise LookupError(f"the row has no column {column}")
        if name == "unit_tests":
            return _passes(shipped.program(item["completion"], item["fields"][column]), seconds)
        return getattr(shipped, name)(item["completion"], item["fields"][column])

    return of_column


def _passes(program: str, seconds: float) -> bool:
    """Return whether a program ends without an error, in a forked process; whatever else it does is no fault of the reward."""
    # A program that ends its process says nothing: only its end says this word.
    read, write, word = *os.pipe(), os.urandom(16)
    pid = os.fork()
    if not pid:
        try:
            _close_all_but(write)
            _limit(seconds)
            _watch()
            exec(compile(program, "completion.py", "exec"), {"__name__": "completion"})
            os.write(write, word)
        finally:
            os._exit(1)
    os.close(write)
    # Unbuffered: a program that writes less than the word is not waited for.
    with contextlib.closing(os.fdopen(read, "rb", 0)) as pipe:
        said = pipe.read(len(word)) if select.select([pipe], [], [], seconds)[0] else b""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return said == word


def _close_all_but(kept: int) -> None:
    """Close all files but the three that are standard and `kept`."""
    os.closerange(3, kept)
    os.closerange(kept + 1, 256)


def _limit(seconds: float) -> None:
    """Limit processor time, memory, files and processes of this process."""
    most = math.ceil(seconds)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for which, value in (
        (resource.RLIMIT_CPU, most), (resource.RLIMIT_AS, used + MEMORY), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):  # fmt: skip
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _watch() -> None:
    """Refuse what no reward may do; an audit hook cannot be removed."""
    readable = tuple({str(Path(place).resolve()) for place in (sys.prefix, sys.base_prefix, *sys.path) if place})

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) if isinstance(flags, int) else 0
            if writes or (isinstance(mode, str) and set(mode) & set("wax+")):
                raise PermissionError("a reward may write no file")
            if not isinstance(path, int) and not os.path.realpath(os.fsdecode(path)).startswith(readable):
                raise PermissionError("a reward may read no file but Python's own")
        elif event.startswith(_REFUSED):
            raise PermissionError(f"a reward may not use {event}")

    # multiprocessing starts programs by it, which is not an event.
    _posixsubprocess.fork_exec = None  # type: ignore[assignment]
    sys.addaudithook(hook)


def _leave_network() -> None:
    """Leave the network's namespace where the system allows it, and end with the parent."""
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    library.unshare(_NEW_USER | _NEW_NETWORK)


def _module_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("flytune_rewards_shipped", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
