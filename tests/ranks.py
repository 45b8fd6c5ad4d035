"""Runs a function in real processes that make up a gloo group, forked from this one so that nothing is imported twice.

torchrun and Flyte's Elastic start new interpreters, 15 seconds each; the whole path through them is tests/test_tasks_run.py.
"""

import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Callable
from typing import Any

TIMEOUT = 300


class RankFailed(Exception):
    """One of the ranks raised, or was killed."""


def run(world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)` returns on rank 0 of `world_size` processes.

    Raises:
        RankFailed: with the traceback of the first rank that failed.
    """
    import trl  # noqa: F401 (before the fork)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, sender, function, arguments))
        for rank, (_, sender) in enumerate(pipes)
    ]
    try:
        for process, (_, sender) in zip(ranks, pipes, strict=True):
            process.start()
            sender.close()
        answers = [_answer(process, receiver) for process, (receiver, _) in zip(ranks, pipes, strict=True)]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    for failed, value in answers:
        if failed:
            raise RankFailed(value)
    return answers[0][1]


def _rank(rank: int, world_size: int, port: int, sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if world_size == 1:
        del os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]
    # The libraries' own warnings about each other are not what these runs are about.
    warnings.simplefilter("ignore")
    try:
        sender.send((False, function(*arguments)))
    except BaseException:  # noqa: BLE001 (all that a rank can die of is the test's to see)
        sender.send((True, traceback.format_exc()))
    finally:
        sender.close()
        # Not exit: atexit handlers and destructors are the parent's.
        os._exit(0)


def _answer(process: Any, receiver: Any) -> tuple[bool, Any]:
    try:
        if receiver.poll(TIMEOUT):
            return receiver.recv()
        return True, f"{process.name}: no answer in {TIMEOUT} s"
    except EOFError:
        process.join()
        return True, f"{process.name}: ended by signal {-process.exitcode}"
