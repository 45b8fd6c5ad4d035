"""Walls of the kernel around the process that calls: Landlock (files, TCP), and a filter of system calls.

Both hold whatever the code of the process does, also native code, and cannot be taken down again. Linux alone
has them; a process without capabilities may put them up, also in a pod with seccompProfile RuntimeDefault.

The process that computes rewards reads this file by its path, so it imports nothing but Python's own library.
"""

import ctypes
import os
import platform
import struct
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

_NO_NEW_PRIVILEGES, _DUMPABLE, _SECCOMP, _FILTER = 38, 4, 22, 2
"""Options of prctl, and seccomp's mode (Linux's linux/prctl.h, linux/seccomp.h)."""
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of Landlock's system calls, the same on all machines (linux/landlock.h)."""
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of Landlock's rights of files, by the version that has brought the last of them."""
_TCP, _SCOPES = 0b11, 0b11
"""Rights to bind and to connect (version 4); abstract sockets and signals of processes outside (version
6)."""
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
"""Shared libraries, and what Python's own library reads."""

_NUMBERS = {
    "x86_64": """
        read=0 write=1 open=2 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10 munmap=11
        brk=12 rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 ioctl=16 pread64=17 readv=19 writev=20
        access=21 pipe=22 select=23 sched_yield=24 mremap=25 mincore=27 madvise=28 dup=32 dup2=33 nanosleep=35
        getpid=39 clone=56 exit=60 uname=63 fcntl=72 getcwd=79 chdir=80 fchdir=81 readlink=89 umask=95
        gettimeofday=96 getrlimit=97 getrusage=98 sysinfo=99 times=100 getuid=102 getgid=104 geteuid=107
        getegid=108 getppid=110 getpgrp=111 getgroups=115 getresuid=118 getresgid=120 getpgid=121 getsid=124
        rt_sigtimedwait=128 sigaltstack=131 statfs=137 fstatfs=138 getpriority=140 arch_prctl=158 gettid=186
        time=201 futex=202 sched_getaffinity=204 getdents64=217 set_tid_address=218 restart_syscall=219
        clock_gettime=228 clock_getres=229 clock_nanosleep=230 exit_group=231 epoll_wait=232 epoll_ctl=233
        tgkill=234 openat=257 newfstatat=262 readlinkat=267 faccessat=269 pselect6=270 ppoll=271
        set_robust_list=273 get_robust_list=274 epoll_pwait=281 eventfd2=290 epoll_create1=291 dup3=292
        pipe2=293 preadv=295 prlimit64=302 getcpu=309 getrandom=318 membarrier=324 statx=332 rseq=334
        clone3=435 faccessat2=439
        """,
    "aarch64": """
        getcwd=17 eventfd2=19 epoll_create1=20 epoll_ctl=21 epoll_pwait=22 dup=23 dup3=24 fcntl=25 ioctl=29
        statfs=43 fstatfs=44 faccessat=48 chdir=49 fchdir=50 openat=56 close=57 pipe2=59 getdents64=61
        lseek=62 read=63 write=64 readv=65 writev=66 pread64=67 preadv=69 pselect6=72 ppoll=73 readlinkat=78
        newfstatat=79 fstat=80 exit=93 exit_group=94 set_tid_address=96 futex=98 set_robust_list=99
        get_robust_list=100 nanosleep=101 clock_gettime=113 clock_getres=114 clock_nanosleep=115
        restart_syscall=128 sched_getaffinity=123 sched_yield=124 tgkill=131 sigaltstack=132 rt_sigaction=134
        rt_sigprocmask=135 rt_sigtimedwait=137 rt_sigreturn=139 getpriority=141 getresuid=148 getresgid=150
        times=153 getpgid=155 getsid=156 getgroups=158 uname=160 getrlimit=163 getrusage=165 umask=166
        getcpu=168 gettimeofday=169 getpid=172 getppid=173 getuid=174 geteuid=175 getgid=176 getegid=177
        gettid=178 sysinfo=179 brk=214 munmap=215 mremap=216 clone=220 mmap=222 mprotect=226 mincore=232
        madvise=233 prlimit64=261 getrandom=278 membarrier=283 statx=291 rseq=293 clone3=435 faccessat2=439
        """,
}
_CALLS = {
    machine: {name: int(number) for name, number in (pair.split("=") for pair in text.split())}
    for machine, text in _NUMBERS.items()
}
"""All system calls that code in a reward may use, with their numbers (linux/unistd.h). All others fail:
sockets, new programs and processes, ptrace, process_vm_readv, signals to others, io_uring, mounts, keys,
namespaces, and whatever a kernel adds."""
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* (linux/audit.h)."""
_ALLOW, _ERROR, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050000, 1, 38
_THREAD = 0x10000
"""CLONE_THREAD (linux/sched.h)."""
_TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x5450, 0x5451)
"""ioctl of TCGETS (is it a terminal?), TIOCGWINSZ, FIONCLEX and FIOCLEX."""
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
"""Instructions of a filter (linux/bpf_common.h): BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ, BPF_JMP |
BPF_JSET, BPF_RET."""
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16
"""Offsets in seccomp_data; an argument has 8 bytes, the lower four first."""


class NoWall(Exception):
    """The kernel has no such wall; says why."""


def missing() -> str | None:
    """Return why this machine's kernel has no walls; None if it has them. Nothing changes for the process."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no Landlock"
    if platform.machine() not in _CALLS:
        return f"the filter of system calls is not written for {platform.machine()}"
    try:
        _version(_library())
    except NoWall as error:
        return str(error)
    if not Path("/proc/sys/kernel/seccomp").exists():
        return "the kernel has no seccomp"
    return None


def put_up() -> None:
    """Leave this process the reading of Python's own files and system calls that reach nobody; for good.

    Raises:
        NoWall: the kernel refuses one; the process may have a part of them.
    """
    if reason := missing():
        raise NoWall(reason)
    forbid_privileges()
    restrict_files()
    filter_calls()


def forbid_privileges() -> None:
    """Keep programs from giving this process rights (setuid); a process without rights must do so before its
    walls."""
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def hide_memory(hidden: bool = True) -> None:
    """Keep other processes of the same user from reading this one's memory and environment (/proc/PID), or
    let them again."""
    if sys.platform.startswith("linux"):
        _call("prctl", _DUMPABLE, int(not hidden), 0, 0, 0)


@cache
def readable() -> list[str]:
    """Return the folders and files that code in a reward may read: Python's own, and shared libraries."""
    libraries = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    bases = [place for place in (sys.prefix, sys.base_prefix) if place not in ("/", "/usr", "/usr/local")]
    beside = [str(Path(place) / "lib") for place in (sys.prefix, sys.base_prefix)]
    named = [*libraries, *bases, *beside, *_FOLDERS, *_FILES]
    return sorted({os.path.realpath(place) for place in named if place and os.path.exists(place)})


def restrict_files() -> None:
    """Refuse all files but the readable ones, TCP, and what reaches processes outside (Landlock).

    Raises:
        NoWall: the kernel has none.
    """
    library = _library()
    version = _version(library)
    rights = max(count for since, count in _FILE_RIGHTS.items() if since <= version)
    attributes = [(1 << rights) - 1]
    if version >= 4:
        attributes.append(_TCP)
    if version >= 6:
        attributes.append(_SCOPES)
    content = struct.pack(f"={len(attributes)}Q", *attributes)
    ruleset = _checked(library.syscall(_CREATE_RULESET, content, len(content), 0), "Landlock")
    for place in readable():
        below = os.open(place, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ_FILE | _READ_DIR if os.path.isdir(place) else _READ_FILE
        _checked(library.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, below), 0), "Landlock")
        os.close(below)
    _checked(library.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def filter_calls() -> None:
    """Refuse all system calls but the known ones (a filter of seccomp).

    Raises:
        NoWall: the kernel has none.
    """
    filters = _program(_CALLS[platform.machine()], _MACHINES[platform.machine()])
    content = ctypes.create_string_buffer(
        b"".join(struct.pack("=HBBI", *instruction) for instruction in filters)
    )
    program = struct.pack("@HP", len(filters), ctypes.addressof(content))
    _call("prctl", _SECCOMP, _FILTER, program, 0, 0)


def _program(calls: dict[str, int], machine: int) -> list[tuple[int, int, int, int]]:
    """Return the filter's instructions: (operation, lines to skip if true, if false, operand)."""
    refuse, unknown, allow = ((_RETURN, 0, 0, value) for value in (_ERROR | _EPERM, _ERROR | _ENOSYS, _ALLOW))
    lines = [(_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, machine), refuse, (_LOAD, 0, 0, _NUMBER)]

    def judged(call: str, *decision: tuple[int, int, int, int]) -> None:
        lines.extend([(_EQUAL, 0, len(decision), calls[call]), *decision])

    # The C library falls back to clone, whose flags are an argument that a filter sees.
    judged("clone3", unknown)
    judged("clone", (_LOAD, 0, 0, _ARGUMENTS), (_ANY_BIT, 0, 1, _THREAD), allow, refuse)
    judged("prlimit64", (_LOAD, 0, 0, _ARGUMENTS), (_EQUAL, 0, 1, 0), allow, refuse)
    judged("tgkill", (_LOAD, 0, 0, _ARGUMENTS), (_EQUAL, 0, 1, os.getpid()), allow, refuse)
    questions = [line for number in _TERMINAL_QUESTIONS for line in ((_EQUAL, 0, 1, number), allow)]
    judged("ioctl", (_LOAD, 0, 0, _ARGUMENTS + 8), *questions, refuse)
    for call in calls:
        if call not in ("clone3", "clone", "prlimit64", "tgkill", "ioctl"):
            judged(call, allow)
    return [*lines, refuse]


def _version(library: Any) -> int:
    version: int = library.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        raise NoWall(
            f"the kernel has no Landlock ({os.strerror(ctypes.get_errno())}); Linux has it since 5.13"
        )
    return version


@cache
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: Any) -> None:
    given = [
        ctypes.c_ulong(argument) if isinstance(argument, int) else argument for argument in arguments[1:]
    ]
    _checked(getattr(_library(), function)(arguments[0], *given), function)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise NoWall(f"the kernel refuses {what}: {os.strerror(ctypes.get_errno())}")
    return result
