"""Chunks to samples on all cores: processes that each hold the tokenizer, their results in order."""

import gc
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for_all
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flytune.data.process import Chunk, Sampler, Samples
from flytune.data.tokenizer import Encoder
from flytune.errors import DataError
from flytune.recipe.recipe import DataRequest

logger = logging.getLogger(__name__)
ALONE = 16
"""Chunks of a source that are done here before processes are started: these need seconds to import."""
LARGE = 16_000_000
"""Bytes of files for which they are started at once."""
_AHEAD = 2
"""Chunks that wait beside those in work, so that no process does."""
_sampler: Sampler | None = None


class Workers:
    """Makes samples; in processes of their own as soon as there is enough to do."""

    def __init__(self, request: DataRequest, tokenizer: Any, processes: int | None = None, size: int | None = None) -> None:
        """`size` is that of all files in bytes, where it is known."""
        encoder = Encoder(tokenizer)
        self._arguments = request, encoder
        self._processes = cores() if processes is None else processes
        self._sampler = Sampler(request, encoder)
        self._pool: ProcessPoolExecutor | None = None
        self._is_ready = threading.Event()
        if self._processes > 1 and (size or 0) >= LARGE:
            self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def samples(self, chunks: Iterator[Chunk]) -> Iterator[Samples]:
        """Of all chunks, in their order; once the processes run a few are in work ahead. Errors come in their order, too.

        Raises:
            DataError: as Sampler.samples, and what `chunks` raises; or a process was killed.
        """
        for number, chunk in enumerate(chunks, 1):
            yield (samples := self._sampler.samples(chunk))
            # All others shall know the format that a first row told.
            if self._processes > 1 and samples.tally.form:
                if number >= ALONE:
                    self._start()
                if self._is_ready.is_set():
                    break
        try:
            yield from self._ahead(chunks)
        except BrokenProcessPool:
            raise DataError(
                f"one of {self._processes} processes that tokenize was killed, most likely for want of memory; "
                "give prepare_data more of it (tasks/prepare.py), or fewer cores"
            ) from None

    def _ahead(self, chunks: Iterator[Chunk]) -> Iterator[Samples]:
        waiting: deque[Future[Samples]] = deque()
        stopped: BaseException | None = None
        while waiting or stopped is None:
            while stopped is None and len(waiting) < self._processes + _AHEAD:
                try:
                    chunk = next(chunks)
                except (StopIteration, DataError) as end:  # an error is told after all that stands before it
                    stopped = end
                else:
                    assert self._pool is not None
                    waiting.append(self._pool.submit(_samples, chunk))
            if waiting:
                yield waiting.popleft().result()
        if isinstance(stopped, DataError):
            raise stopped

    def _start(self) -> None:
        """Starts the processes beside what goes on here: their imports take seconds."""
        if self._pool is not None:
            return
        # Not forks of this process, which may have threads: a server that imported the libraries is forked.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["transformers.utils.chat_template_utils", "tokenizers", "numpy", __name__])
        self._pool = ProcessPoolExecutor(self._processes, context, _begin, self._arguments)
        threading.Thread(target=self._wait_for, args=(self._pool,), daemon=True).start()

    def _wait_for(self, pool: ProcessPoolExecutor) -> None:
        with suppress(RuntimeError):  # all was done before they were there
            wait_for_all([pool.submit(os.getpid) for _ in range(self._processes)])
            self._is_ready.set()
            logger.info("tokenizing in %d processes", self._processes)


def cores() -> int:
    """Cores that this process may use: those it may run on, and of a container's share of the machine (cgroup v2) no more."""
    found = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return found if quota == "max" else max(1, min(found, int(quota) // int(period)))
    except (OSError, ValueError):
        return found


def _begin(request: DataRequest, encoder: Encoder) -> None:
    """In each process, once."""
    global _sampler
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core is enough
    _sampler = Sampler(request, encoder)
    gc.freeze()  # what was imported stays: it need not be looked through again and again
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed would leave its processes waiting for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)


def _samples(chunk: Chunk) -> Samples:
    assert _sampler is not None
    return _sampler.samples(chunk)
