"""The process that computes rewards: a script that reads batches as lines of JSON and answers each with one
line.

It is started without the environment of its parent. Each reward computes a batch in a forked process, so that
nothing is left behind for the next batch; that process is ended where one item takes too long. Forked
processes have limits of processor time, memory and files, and are behind the kernel's walls (walls.py): they
read Python's own files alone, and reach nobody. An audit hook is the second line, which says what a reward
may not do (docs/security.md).

It runs by its path, and imports nothing but Python's own library and the files beside it.
"""

import _posixsubprocess
import ast
import builtins
import contextlib
import ctypes
import importlib.util
import itertools
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
LARGEST = 1e9
"""Largest size of a reward (flytune.limits.FACTOR)."""
_LONGEST = 2**20
"""Bytes of a line in which a process answers for an item; an error has 300 characters."""
_FORGED = "writes into the answers of its process"
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
"""Options of unshare (Linux's sched.h)."""
_DEATH_SIGNAL = 1
"""Option of prctl (Linux's sys/prctl.h)."""
_REFUSED = (
    "socket.",
    "subprocess.",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "os.fork",
    "os.forkpty",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.kill",
    "shutil.",
    "ctypes.",
    "pty.",
    "ftplib.",
    "smtplib.",
    "urllib.",
    "http.",
    "signal.",
    "sqlite3.",
    "webbrowser.",
)
"""Beginnings of the events (docs.python.org/3/library/audit_events.html) that no reward may cause."""


def main() -> None:
    """Answer batches until the input ends."""
    _leave_network()
    no_walls = _walls_problem()
    # Looked up once, before any fork.
    walls.readable()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "r+", encoding="utf-8") as null:
        os.dup2(null.fileno(), 1)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps([_batch(reward, request, no_walls) for reward in request["rewards"]]) + "\n")
        answers.flush()


def _walls_problem() -> str | None:
    """Return why the kernel's walls cannot be put up here, by an attempt; None if they can."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            walls.put_up()
        except walls.NoWall as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        reason = pipe.read()
    os.waitpid(pid, 0)
    return reason or None


def _batch(reward: dict[str, Any], request: dict[str, Any], no_walls: str | None) -> list[dict[str, Any]]:
    """Return the value, or the error, of each item; what follows an error is not computed."""
    items, seconds = request["items"], float(request["seconds"])
    if no_walls and _is_program(reward) and not reward["accept_no_wall"]:
        return [{"no_walls": no_walls, "error": "needs the walls of the kernel"}]
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        try:
            _compute(reward, items, seconds, write, no_walls is None)
        finally:
            os._exit(1)
    os.close(write)
    answers: list[dict[str, Any]] = []
    left = b""
    until = time.monotonic() + seconds + 1
    with contextlib.closing(os.fdopen(read, "rb", 0)) as pipe:
        while len(answers) < len(items):
            left_seconds = until - time.monotonic()
            if left_seconds < 0 or not select.select([pipe], [], [], left_seconds)[0]:
                answers.append({"error": f"takes more than {seconds:g} s"})
                break
            content = pipe.read(2**16)
            if not content:
                answers.append({"error": _end_of(pid, seconds)})
                pid = 0
                break
            *lines, left = (left + content).split(b"\n")
            answers += [_answer_of(line) for line in (*lines, *[b""] * (len(left) > _LONGEST))]
            until = time.monotonic() + seconds + 1 if lines else until
            if len(answers) > len(items):
                answers = [{"error": _FORGED}]
            if (
                wrong := next((at for at, answer in enumerate(answers) if "error" in answer), None)
            ) is not None:
                del answers[wrong + 1 :]
                break
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return answers


def _answer_of(line: bytes) -> dict[str, Any]:
    """Return what a process has written of an item; code that finds the pipe can write anything."""
    try:
        content = json.loads(line)
    except ValueError:
        content = None
    if isinstance(content, dict) and (
        isinstance(content.get("value"), float) or isinstance(content.get("error"), str)
    ):
        return content
    return {"error": _FORGED}


def _end_of(pid: int, seconds: float) -> str:
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return f"takes more than {seconds:g} s, or more memory than there is"
    return (
        f"ends its process ({'signal ' + str(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else 'it exits'})"
    )


def _is_program(reward: dict[str, Any]) -> bool:
    """Return whether a reward runs the code of answers, each in processes of its own."""
    return reward["code"] is None and reward["name"] == "unit_tests"


def _compute(
    reward: dict[str, Any], items: list[dict[str, Any]], seconds: float, write: int, has_walls: bool
) -> None:
    """Write a line for each item. Runs in a forked process."""
    os.setpgid(0, 0)
    # It reads nothing, and has no way to those that read its process's answers.
    os.dup2(1, 0)
    _close_all_but(write)
    if _is_program(reward):
        _limit(len(items) * seconds + 1)
    else:
        _enclose(len(items) * seconds + 1, has_walls)
    try:
        function = _function_of(reward, seconds, has_walls)
    except BaseException as error:  # noqa: BLE001 (a file may raise any)
        os.write(
            write,
            json.dumps({"error": f"the file cannot be read as Python: {_said(error)}"}).encode() + b"\n",
        )
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
    if not math.isfinite(reward := float(number)):
        return {"error": f"returns {reward}; it must return a finite number"}
    if abs(reward) > LARGEST:
        return {
            "error": f"returns {reward:g}; its size must be {LARGEST:.0e} at most, so that squares and sums "
            "are numbers too"
        }
    return {"value": reward}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _function_of(reward: dict[str, Any], seconds: float, has_walls: bool) -> Callable[[dict[str, Any]], Any]:
    """Return the function of an item: {prompt, completion, fields}."""
    name, column = reward["name"], reward["column"]
    if reward["code"] is not None:
        module = types.ModuleType("rewards")
        exec(compile(reward["code"], "rewards.py", "exec"), module.__dict__)
        function = getattr(module, name, None)
        if not callable(function):
            raise NameError(f"it has no function {name}")
        return lambda item: function(item["completion"], prompt=item["prompt"], **item["fields"])
    if name == "regular_expression":
        return lambda item: shipped.regular_expression(item["completion"], reward["pattern"])

    def of_column(item: dict[str, Any]) -> Any:
        value = _part(item["fields"], column)
        if name == "unit_tests":
            return _passes(shipped.code_of(item["completion"]), shipped.tests_of(value), seconds, has_walls)
        return getattr(shipped, name)(item["completion"], value)

    return of_column


def _part(fields: dict[str, Any], column: str) -> Any:
    """Return the value of a column, or of a part of an object that is named by its path:
    `extra_info.answer`."""
    if column in fields:
        return fields[column]
    value: Any = fields
    for key in column.split("."):
        if not isinstance(value, dict) or key not in value:
            raise LookupError(
                f"the row has no column {column}; it has {', '.join(sorted(fields))[:200] or 'none'}: write "
                "column: NAME beside the reward's name, or map it in data.columns"
            )
        value = value[key]
    return value


def _passes(code: str, tests: str, seconds: float, has_walls: bool) -> bool:
    """Return whether tests of a program end without an error; whatever else the program does is no fault of
    the reward.

    The program and its tests run in two processes: what the first does to itself, or sends, decides nothing
    in the second.
    """
    asks, answers, verdict = os.pipe(), os.pipe(), os.pipe()
    work = {
        (asks[0], answers[1]): lambda: _run_answer(code, asks[0], answers[1]),
        (answers[0], asks[1], verdict[1]): lambda: _run_tests(tests, answers[0], asks[1], verdict[1]),
    }
    pids = [_forked(kept, seconds, has_walls, function) for kept, function in work.items()]
    for end in (*asks, *answers, verdict[1]):
        os.close(end)
    # Unbuffered, so that nothing is waited for after the byte.
    with contextlib.closing(os.fdopen(verdict[0], "rb", 0)) as pipe:
        passed = bool(select.select([pipe], [], [], seconds)[0] and pipe.read(1))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return passed


def _forked(kept: tuple[int, ...], seconds: float, has_walls: bool, work: Callable[[], None]) -> int:
    """Return the process that does some work with these files alone."""
    pid = os.fork()
    if not pid:
        try:
            _close_all_but(*kept)
            _enclose(seconds, has_walls)
            work()
        finally:
            os._exit(1)
    return pid


def _run_answer(code: str, read: int, write: int) -> None:
    """Run the code of an answer, and what its tests call."""
    namespace: dict[str, Any] = {"__name__": "completion"}
    exec(compile(code, "completion.py", "exec"), namespace)
    peer = calls.Peer(read, write, is_answer=True)
    peer.send_names(namespace)
    peer.serve()


def _run_tests(tests: str, read: int, write: int, verdict: int) -> None:
    """Run tests of an answer, and write a byte at their end."""
    tree = ast.parse(tests, "tests.py")
    names = calls.Peer(read, write, is_answer=False).receive_names()
    defined = {name: value for name, value in names.items() if not hasattr(builtins, name)}
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    # What an answer calls abs or sorted is not what its tests mean, unless they test just that.
    exec(
        compile(tree, "tests.py", "exec"),
        (defined if named & defined.keys() else names) | {"__name__": calls.TESTS},
    )
    os.write(verdict, b"1")


def _close_all_but(*kept: int) -> None:
    """Close all files but the three that are standard and `kept`."""
    for before, after in itertools.pairwise((2, *sorted(kept), 256)):
        os.closerange(before + 1, after)


def _enclose(seconds: float, has_walls: bool) -> None:
    """Put all walls around this process, for good."""
    _limit(seconds)
    sys.set_int_max_str_digits(0)
    if has_walls:
        walls.put_up()
    _watch()


def _limit(seconds: float) -> None:
    """Limit processor time, memory, files and processes of this process."""
    most = math.ceil(seconds)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for which, value in (
        (resource.RLIMIT_CPU, most),
        (resource.RLIMIT_AS, used + MEMORY),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _watch() -> None:
    """Refuse what no reward may do; an audit hook cannot be removed."""
    readable = walls.readable()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = (
                flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) if isinstance(flags, int) else 0
            )
            if writes or (isinstance(mode, str) and set(mode) & set("wax+")):
                raise PermissionError("a reward may write no file")
            if not isinstance(path, int) and not _is_below(os.fsdecode(path), readable):
                raise PermissionError("a reward may read no file but Python's own")
        elif event.startswith(_REFUSED):
            raise PermissionError(f"a reward may not use {event}")

    # multiprocessing starts programs by it, which is not an event.
    _posixsubprocess.fork_exec = None  # type: ignore[assignment]
    sys.addaudithook(hook)


def _is_below(path: str, folders: list[str]) -> bool:
    """Return whether an absolute path is one of some folders and files, or below one; others may be relative
    to any folder."""
    real = os.path.realpath(path)
    return os.path.isabs(path) and any(
        real == place or real.startswith(place.rstrip("/") + "/") for place in folders
    )


def _leave_network() -> None:
    """Leave the network's namespace where the system allows it, and end with the parent."""
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    walls.forbid_privileges()
    library.unshare(_NEW_USER | _NEW_NETWORK)
    walls.hide_memory()


def _module_beside(name: str) -> Any:
    file = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"flytune_rewards_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


calls, shipped, walls = map(_module_beside, ("calls", "shipped", "walls"))

if __name__ == "__main__":
    main()
