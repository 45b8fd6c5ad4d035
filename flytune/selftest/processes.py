"""Runs a function in real processes that make up one process group, forked from this one so that nothing is imported twice.

torchrun and Flyte's Elastic start new interpreters, 15 seconds each; the whole path through them is tests/tasks/test_run.py.
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

TIMEOUT = 300
_LONGEST = timedelta(hours=24)
"""Longest wait for what the first node asks of the others."""


class RankFailed(Exception):
    """One of the ranks raised, or was killed."""


class Share(NamedTuple):
    """One node's part of a process group that spans several."""

    node: int
    nodes: int
    host: str
    """Address of the first node."""
    port: int


class Nodes:
    """The processes that torchrun has started, one a node: the first says what is run, and all run their share of it.

    They talk through torchrun's own store, so that nothing but its rendezvous must be reached.
    """

    def __init__(self) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store: Any = PrefixStore("selftest", TCPStore(host, port, is_master=False, timeout=_LONGEST))
        self._numbers = itertools.count()
        # This node's address, as the others see it.
        with socket.create_connection((host, port)) as connection:
            self._host = connection.getsockname()[0]

    def run(self, job: Any, work: Callable[[Share], Any]) -> Any:
        """Have the other nodes do `job`, and this one, the first, `work`; return what `work` returns.

        Raises:
            RankFailed: of the node that failed first.
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
        """Do another node's share of each job, until the first node has no more."""
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
        """Tell the other nodes, on the first one, that there is no more to do."""
        self._store.set(f"job-{next(self._numbers)}", pickle.dumps((None, Share(0, 0, "", 0))))


def run(
    world_size: int, function: Callable[..., Any], *arguments: Any, log: Path | None = None, share: Share | None = None
) -> Any:
    """Return `function(*arguments)` of rank 0 of `world_size` processes; on a node without it, of the node's first.

    Args:
        log: receives what the ranks print; this process's own output when not given.
        share: this node's, where `world_size` is that of several.

    Raises:
        RankFailed: with the traceback of the first rank that failed; the others are ended at once.
    """
    _import_before_the_fork()
    share = share or Share(0, 1, "127.0.0.1", _free_port())
    here = world_size // share.nodes
    first = share.node * here
    context = multiprocessing.get_context("fork")
    ranks: dict[Any, Any] = {}
    try:
        for rank in range(first, first + here):
            # Each pipe is made right before its rank, so that no other rank holds its end open when that one dies.
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, here, share, sender, log, function, arguments))
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
    here: int,
    share: Share,
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
        # Of a process that torchrun has started: its store is not that of these ranks.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        if (world_size := here * share.nodes) > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % here), "WORLD_SIZE": str(world_size)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(here), "MASTER_ADDR": share.host, "MASTER_PORT": str(share.port)}
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


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
