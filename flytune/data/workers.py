"""Chunks to samples on all cores: processes that each hold the tokenizer, their results in order."""

import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flytune.data.sampling import Chunk, Sampler, Samples
from flytune.errors import DataError
from flytune.recipe import DataRequest

logger = logging.getLogger(__name__)
ALONE = 16
"""Chunks of a source that are done here before processes are started: these need some seconds to import."""
_AHEAD = 2
"""Chunks that wait beside those in work, so that no process does."""
_sampler: Sampler | None = None


class Workers:
    """Makes samples; in processes of their own as soon as there is enough to do."""

    def __init__(self, request: DataRequest, tokenizer: Any, processes: int | None = None) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._processes = cores() if processes is None else processes
        self._sampler = Sampler(request, tokenizer)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def samples(self, chunk: Chunk) -> Samples:
        """Of one chunk, made in this process."""
        return self._sampler.samples(chunk)

    def ahead(self, chunks: Iterator[Chunk]) -> Iterator[Samples]:
        """Of all chunks, in their order; a few of them are in work ahead. Errors come in their order, too.

        Raises:
            DataError: as Sampler.samples, and what `chunks` raises; or a process was killed.
        """
        if self._processes < 2:
            yield from map(self.samples, chunks)
            return
        pool = self._started()
        waiting: deque[Future[Samples]] = deque()
        stopped: BaseException | None = None
        while waiting or stopped is None:
            while stopped is None and len(waiting) < self._processes + _AHEAD:
                try:
                    waiting.append(pool.submit(_samples, next(chunks)))
                except (StopIteration, DataError) as end:  # an error is told after all that stands before it
                    stopped = end
            if waiting:
                try:
                    yield waiting.popleft().result()
                except BrokenProcessPool:
                    raise DataError(
                        f"one of {self._processes} processes that tokenize was killed, most likely for want of memory; "
                        "give prepare_data more of it (tasks/prepare.py), or fewer cores"
                    ) from None
        if isinstance(stopped, DataError):
            raise stopped

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Not forks of this process, which may have threads: a server that imported the libraries is forked.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(
                ["transformers.tokenization_utils_tokenizers", "transformers.utils.chat_template_utils", __name__]
            )
            self._pool = ProcessPoolExecutor(self._processes, context, _begin, (self._request, self._tokenizer))
            logger.info("tokenizing in %d processes", self._processes)
        return self._pool


def cores() -> int:
    """Cores that this process may use: those it may run on, and of a container's share of the machine (cgroup v2) no more."""
    found = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return found if quota == "max" else max(1, min(found, int(quota) // int(period)))
    except (OSError, ValueError):
        return found


def _begin(request: DataRequest, tokenizer: Any) -> None:
    """In each process, once."""
    global _sampler
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core is enough
    _sampler = Sampler(request, tokenizer)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed would leave its processes waiting for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)


def _samples(chunk: Chunk) -> Samples:
    assert _sampler is not None
    return _sampler.samples(chunk)
