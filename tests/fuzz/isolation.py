"""One input in a process of its own: what it did, in how many seconds of processor and clock, and bytes."""

import contextlib
import hashlib
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytune.errors import FlytuneError

SECONDS = 5.0
"""Limit of processor time of one input."""
CLOCK_SECONDS = 8 * SECONDS
"""Limit of time on the clock, at which a process that waits is ended; what it has waited for a processor is
not counted."""
BYTES = 10**9
"""Limit of the memory that one input adds."""
_ADDRESS_BYTES = 6 * BYTES
"""Limit of addresses that one input adds; threads and maps reserve many that they never use."""
_LONGEST_MESSAGE = 20_000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")
"""Characters that a terminal obeys instead of showing them."""

_OTHERS_WORDS = re.compile(r"instance of [A-Z]\w+|should match pattern|<function \w+|<class '")
"""Words of pydantic and Python that say nothing to a person who writes a file."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one input."""

    verdict: str
    """`accepted`, `refused` (an error of ours), or `failure`."""
    text: str
    """The error's message, or what is wrong."""
    seconds: float
    """Processor time."""
    clock: float
    """Time on the clock."""
    bytes: int
    """Growth of resident memory at its peak."""


OF_ADDRESS, OF_ENVIRONMENT, OF_FILE = "Zq7Wk4Rt9Xv2", "Hd5Lp8Mn3Bc6Jf1", "Vs2Gy7Tk4Qw9"
"""Marks in each credential that is drawn, in a variable of the environment, and in a file that nothing may
read."""


def shown_mark(text: str) -> str | None:
    """Return what secret a text shows; None if it shows none."""
    marks = {
        OF_ADDRESS: "a credential",
        OF_ENVIRONMENT: "a variable's secret",
        OF_FILE: "another file's content",
    }
    return next((f"a text with {what}" for mark, what in marks.items() if mark in text), None)


class Wrong(Exception):
    """Result that is not what the input says."""


def run(check: Callable[[], Any]) -> Outcome:
    """Run `check` in a forked process; an error of flytune.errors is a refusal, any other one a failure."""
    before = _resident()
    receiving, sending = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if (child := os.fork()) == 0:
        os.close(receiving)
        _work(check, sending)
    os.close(sending)
    start = time.monotonic()
    answer, hung = _read(receiving, start + CLOCK_SECONDS, child)
    if hung:
        os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    with contextlib.suppress(ProcessLookupError):  # what it has started and left
        os.killpg(child, signal.SIGKILL)
    clock = time.monotonic() - start
    seconds, grown = used.ru_utime + used.ru_stime, max(0, used.ru_maxrss * 1024 - before)
    verdict, text = json.loads(answer) if answer else ("failure", f"ended without an answer, status {status}")
    if hung:
        verdict, text = (
            "failure",
            f"not at its end after {CLOCK_SECONDS:.0f} s on the clock, {seconds:.1f} s of processor time",
        )
    elif seconds > SECONDS:
        verdict, text = "failure", f"{seconds:.1f} s of processor time; {text}"
    elif grown > BYTES:
        verdict, text = "failure", f"{grown / 1e9:.2f} GB more memory; {text}"
    return Outcome(verdict, text, seconds, clock, grown)


def _work(check: Callable[[], Any], sending: int) -> None:
    """Run in the child, which never returns."""
    verdict, text = "accepted", ""
    try:
        os.setsid()
        _limit(resource.RLIMIT_CPU, int(4 * SECONDS))
        _limit(resource.RLIMIT_AS, _addresses() + _ADDRESS_BYTES)
        _limit(resource.RLIMIT_CORE, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        os.environ["FUZZ_ACCESS_TOKEN"] = OF_ENVIRONMENT
        check()
    except FlytuneError as error:
        problem = problem_of(str(error)) or shown_mark(str(error))
        verdict, text = (
            ("failure", f"{problem}: {error!s:.500}") if problem else ("refused", str(error)[:500])
        )
    except Wrong as error:
        verdict, text = "failure", str(error)[:2000]
    except BaseException:  # noqa: BLE001 (every other end is a finding)
        verdict, text = "failure", traceback.format_exc()[-3000:]
    try:
        os.write(sending, json.dumps([verdict, text]).encode()[:60_000])
    finally:
        os._exit(0)


def _limit(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def problem_of(message: str) -> str | None:
    """Return what a message for users lacks; None if nothing."""
    if not message.strip() or ":" not in message:
        return "a message without what is wrong and where"
    if len(message) > _LONGEST_MESSAGE:
        return f"a message of {len(message):,} characters"
    if match := _CONTROL.search(message):
        return f"a message with the control character {match[0]!r}"
    if match := _OTHERS_WORDS.search(message):
        return f"a message with pydantic's own words, {match[0]!r}"
    if "Traceback (most recent" in message:
        return "a message with a traceback"
    return None


def _delayed(group: int) -> float:
    """Return the seconds for which the processes of a group were ready to run, and other processes had the
    processors."""
    found = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found += int((folder / "schedstat").read_text().split()[1]) / 1e9
    return found


def _read(receiving: int, until: float, child: int) -> tuple[bytes, bool]:
    """Return all that the child says; and True if it says nothing in time."""
    answer = b""
    while (left := until - time.monotonic()) > 0 or (left := until + _delayed(child) - time.monotonic()) > 0:
        ready, _, _ = select.select([receiving], [], [], left)
        if ready:
            part = os.read(receiving, 65536)
            if not part:
                os.close(receiving)
                return answer, False
            answer += part
    os.close(receiving)
    return answer, True


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _addresses() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def names_of(folder: Path) -> list[tuple[str, int, int, int]]:
    """Return each name below a folder with its size, time of change and number: a file that is written has
    others."""
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found.append((str(path), status.st_size, status.st_ctime_ns, status.st_ino))
    return found


def content_of(folder: Path) -> dict[str, str]:
    """Return the hash of each file below a folder, and the targets of links, by name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder"
    return found
