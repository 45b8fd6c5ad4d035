"""Runs a function in real processes that make up one process group, forked from this one so that nothing is imported twice.

torchrun and Flyte's Elastic start new interpreters, 15 seconds each; the whole path through them is tests/test_tasks_run.py.
"""

import gc
import multiprocessing
import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

TIMEOUT = 300


class RankFailed(Exception):
    """One of the ranks raised, or was killed."""


def run(world_size: int, function: Callable[..., Any], *arguments: Any, log: Path | None = None) -> Any:
    """What `function(*arguments)` returns on rank 0 of `world_size` processes.

    Args:
        log: receives what the ranks print; this process's own output when not given.

    Raises:
        RankFailed: with the traceback of the first rank that failed; the others are ended at once.
    """
    _import_before_the_fork()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks: dict[Any, Any] = {}
    try:
        for rank in range(world_size):
            # Each pipe is made right before its rank, so that no other rank holds its end open when that one dies.
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, world_size, port, sender, log, function, arguments))
            ranks[receiver] = rank, process
            process.start()
            sender.close()
        return _answers(ranks, log)[0]
    finally:
        for receiver, (_, process) in ranks.items():
            if process.pid is not None:
                process.kill()
                process.join()
            receiver.close()


def _answers(ranks: dict[Any, Any], log: Path | None) -> dict[int, Any]:
    """What each rank returned, by rank; raises as soon as one of them failed."""
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + TIMEOUT
    while len(answers) < len(ranks):
        waiting = [receiver for receiver, (rank, _) in ranks.items() if rank not in answers]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(ranks[receiver][0]) for receiver in waiting)
            raise RankFailed(f"rank {late}: no answer in {TIMEOUT} s")
        found = [(*ranks[receiver], *_answer(receiver)) for receiver in ready]
        # A rank that died makes its peers raise: where both are seen at once, the death is the cause.
        for rank, process, answered, failed, value in sorted(found, key=lambda item: item[2]):
            if not answered:
                process.join()
                code = process.exitcode
                how = f"ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
                said = log.read_text(encoding="utf-8", errors="replace")[-2000:] if log else ""
                raise RankFailed(f"rank {rank}: {how}" + (f"; printed last:\n{said}" if said else ""))
            if failed:
                raise RankFailed(f"rank {rank}: {value}")
            answers[rank] = value
    return answers


def _answer(receiver: Any) -> tuple[bool, bool, Any]:
    """Whether the rank answered, whether it failed, and what it returned or its traceback."""
    try:
        return True, *receiver.recv()
    except EOFError:
        return False, True, None


def _rank(
    rank: int,
    world_size: int,
    port: int,
    sender: Any,
    log: Path | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    # What the parent imported stays: looking through it for garbage takes a second each time.
    gc.freeze()
    try:
        if log:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
        if world_size > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        else:
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
        # The libraries' own warnings about each other are not what these runs are about.
        warnings.simplefilter("ignore")
        sender.send((False, function(*arguments)))
    except BaseException:  # noqa: BLE001 (all that a rank can die of is the caller's to see)
        sender.send((True, traceback.format_exc()))
    finally:
        sender.close()
        # Not exit: atexit handlers and destructors are the parent's.
        os._exit(0)


def _import_before_the_fork() -> None:
    """Imports once what every rank needs; where there is a GPU, only what does not touch it."""
    import torch
    import trl  # noqa: F401

    # Asks the driver's library, without CUDA. bitsandbytes, which TRL's trainer imports, asks CUDA itself, and a process that
    # has used CUDA cannot be forked.
    if torch.cuda.device_count() == 0:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed  # noqa: F401
            from trl import SFTTrainer  # noqa: F401
