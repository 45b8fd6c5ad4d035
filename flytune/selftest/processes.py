"""A function in the processes of one process group, forked from this process so that nothing is imported
twice.

torchrun and Flyte's Elastic start new interpreters, which takes 15 seconds each; tests/tasks/test_run.py
tests that path.
"""

import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from flytune.objectives import OBJECTIVES
from flytune.training import libraries
from training_estimates.degrees import Degrees

TIMEOUT = 300
_LONGEST = timedelta(hours=24)
"""Longest time that a node waits for the next job."""


class RankFailed(Exception):
    """An error of a rank that raised or was killed."""


class Share(NamedTuple):
    """One node's part of a process group that spans several."""

    node: int
    nodes: int
    host: str
    """Address of the first node."""
    port: int


class Nodes:
    """The processes that torchrun has started, one on each node: the first sends jobs, and all run their
    share of each.

    They communicate through torchrun's own store, so only its rendezvous must be reachable.
    """

    def __init__(self) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store: Any = PrefixStore("selftest", TCPStore(host, port, is_master=False, timeout=_LONGEST))
        self._numbers = itertools.count()
        # This node's address in the network of the others.
        with socket.create_connection((host, port)) as connection:
            self._host = connection.getsockname()[0]

    def run(self, job: Any, work: Callable[[Share], Any]) -> Any:
        """Send `job` to the other nodes, run `work` on this one, the first, and return the result of `work`.

        Raises:
            RankFailed: the error of the node that failed first.
        """
        number, share = next(self._numbers), Share(0, self.count, self._host, _free_port())
        self._store.set(f"job-{number}", pickle.dumps((job, share)))
        value, failures = None, list[tuple[float, str]]()
        try:
            value = work(share)
        except RankFailed as error:
            failures.append((time.time(), str(error)))
        answers = [pickle.loads(self._store.get(f"done-{number}-{node}")) for node in range(1, self.count)]
        if failures := sorted(failures + [answer for answer in answers if answer]):
            raise RankFailed(failures[0][1])
        return value

    def follow(self, work: Callable[[Any, Share], Any]) -> None:
        """Do this node's share of each job, until the first node sends no more."""
        for number in self._numbers:
            job, share = pickle.loads(self._store.get(f"job-{number}"))
            if job is None:
                return
            failed = None
            try:
                work(job, share._replace(node=self.rank))
            except RankFailed as error:
                failed = (time.time(), f"node {self.rank}: {error}")
            self._store.set(f"done-{number}-{self.rank}", pickle.dumps(failed))

    def end(self) -> None:
        """End `follow` on the other nodes; called on the first node."""
        self._store.set(f"job-{next(self._numbers)}", pickle.dumps((None, Share(0, 0, "", 0))))


def run(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    log: Path | None = None,
    share: Share | None = None,
) -> Any:
    """Call `function(*arguments)` in `world_size` processes; return the result of rank 0, or of this node's
    first rank.

    Args:
        log: a file for the output of the ranks; by default it goes to this process's output.
        share: this node's share, if `world_size` spans several nodes.

    Raises:
        RankFailed: a rank failed; the message has its traceback, and the other ranks are killed.
    """
    import torch

    # device_count() asks the driver's library, without CUDA.
    libraries.import_before_fork(torch.cuda.device_count() > 0, OBJECTIVES)
    share = share or Share(0, 1, "127.0.0.1", _free_port())
    here = Degrees(world_size, share.nodes).processes
    first = share.node * here
    context = multiprocessing.get_context("fork")
    ranks: dict[Any, Any] = {}
    try:
        for rank in range(first, first + here):
            # Each pipe is made right before its rank, so that no other rank keeps it open when that one dies.
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, here, share, sender, log, function, arguments)
            )
            ranks[receiver] = rank, process
            process.start()
            sender.close()
        return _answers(ranks, log)[first]
    finally:
        for receiver, (_, process) in ranks.items():
            if process.pid is not None:
                process.kill()
                process.join()
            receiver.close()


def _answers(ranks: dict[Any, Any], log: Path | None) -> dict[int, Any]:
    """Return the results by rank; raise as soon as one rank fails."""
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + TIMEOUT
    while len(answers) < len(ranks):
        waiting = [receiver for receiver, (rank, _) in ranks.items() if rank not in answers]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(ranks[receiver][0]) for receiver in waiting)
            raise RankFailed(f"rank {late}: no answer in {TIMEOUT} s")
        answered_ranks = [(*ranks[receiver], *_answer(receiver)) for receiver in ready]
        # A dead rank makes its peers raise: if both are seen at once, the death is the cause.
        for rank, process, answered, failed, value in sorted(answered_ranks, key=lambda item: item[2]):
            if not answered:
                process.join()
                code = process.exitcode
                end = (
                    f"ended by signal {-code} ({signal.Signals(-code).name})"
                    if code < 0
                    else f"ended with exit code {code}"
                )
                output = log.read_text(encoding="utf-8", errors="replace")[-2000:] if log else ""
                raise RankFailed(f"rank {rank}: {end}" + (f"; last output:\n{output}" if output else ""))
            if failed:
                raise RankFailed(f"rank {rank}: {value}")
            answers[rank] = value
    return answers


def _answer(receiver: Any) -> tuple[bool, bool, Any]:
    """Return True if the rank answered, True if it failed, and its result or traceback."""
    try:
        return True, *receiver.recv()
    except EOFError:
        return False, True, None


def _rank(
    rank: int,
    here: int,
    share: Share,
    sender: Any,
    log: Path | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    # Objects of the parent stay: without this, each garbage collection takes a second to scan them.
    gc.freeze()
    try:
        if log:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
        # Set by torchrun for its own processes; these ranks use another store.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        if (world_size := here * share.nodes) > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % here), "WORLD_SIZE": str(world_size)}
            os.environ |= {
                "LOCAL_WORLD_SIZE": str(here),
                "MASTER_ADDR": share.host,
                "MASTER_PORT": str(share.port),
            }
        else:
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
        # The libraries' warnings about each other are irrelevant here.
        warnings.simplefilter("ignore")
        sender.send((False, function(*arguments)))
    except BaseException:  # noqa: BLE001 (the caller must see every error of a rank)
        sender.send((True, traceback.format_exc()))
    finally:
        sender.close()
        # Not sys.exit: atexit handlers and destructors belong to the parent.
        os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
