"""Processes that make samples, if there is enough data for them."""

import gc
import logging
import multiprocessing
import os
import signal
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

from flytune.console import output
from flytune.data.process import Chunk, Sampler, Samples
from flytune.data.tokenizer import Encoder
from flytune.errors import DataError
from flytune.recipe import DataRequest
from flytune.sentences import counted

logger = logging.getLogger(__name__)
CHUNKS_BEFORE_START = 16
"""Chunks of a source that this process works on before it starts others, which take seconds to import."""
LARGE_BYTES = 16_000_000
"""Bytes of files from which on the processes are started at once."""
_AHEAD = 2
"""Chunks that are queued beyond one for each process, so that no process waits."""
_sampler: Sampler | None = None


class Workers:
    """Maker of samples, in worker processes if there is enough data."""

    def __init__(
        self,
        request: DataRequest,
        tokenizer: Any,
        processes: int | None = None,
        size: int | None = None,
        heldout_below: int | None = None,
        out: Path | None = None,
    ) -> None:
        """Start the worker processes if `size` (of all files, in bytes, if known) is large; `heldout_below`
        and `out` as in Sampler."""
        encoder = Encoder(tokenizer)
        self._arguments = request, encoder, heldout_below, out
        self._processes = cores() if processes is None else processes
        self._sampler = Sampler(*self._arguments)
        self._pool: ProcessPoolExecutor | None = None
        self._is_ready = threading.Event()
        if self._processes > 1 and (size or 0) >= LARGE_BYTES:
            self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def samples(self, chunks: Iterator[Chunk]) -> Iterator[Samples]:
        """Yield the samples of all chunks in order, with errors in their order, too; workers are a few chunks
        ahead.

        Raises:
            DataError: as Sampler.samples and `chunks`; or a process was killed.
        """
        for number, chunk in enumerate(chunks, 1):
            yield (samples := self._sampler.samples(chunk))
            # The workers need the format, which is known after the first row.
            if self._processes > 1 and samples.tally.form:
                if number >= CHUNKS_BEFORE_START:
                    self._start()
                if self._is_ready.is_set():
                    break
        try:
            yield from self._ahead(chunks)
        except BrokenProcessPool:
            raise DataError(
                f"one of {counted(self._processes, 'tokenizing process', 'tokenizing processes')} was "
                "killed, most likely because memory ran out; give its pod more memory (`requests` of PREPARE "
                "in flytune/stages/table.py), or fewer cores"
            ) from None

    def _ahead(self, chunks: Iterator[Chunk]) -> Iterator[Samples]:
        waiting: deque[Future[Samples]] = deque()
        stopped: BaseException | None = None
        while waiting or stopped is None:
            while stopped is None and len(waiting) < self._processes + _AHEAD:
                try:
                    chunk = next(chunks)
                except (
                    StopIteration,
                    DataError,
                ) as end:  # an error is raised after the samples of all earlier chunks
                    stopped = end
                else:
                    assert self._pool is not None
                    waiting.append(self._pool.submit(_samples, chunk))
            if waiting:
                yield waiting.popleft().result()
        if isinstance(stopped, DataError):
            raise stopped

    def _start(self) -> None:
        """Start the processes without waiting for them: their imports take seconds."""
        if self._pool is not None:
            return
        # This process may have threads, so it is not forked; a server process that has imported the libraries
        # is.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["transformers.utils.chat_template_utils", "tokenizers", "numpy", __name__]
        )
        self._pool = ProcessPoolExecutor(self._processes, context, _initialize, self._arguments)
        threading.Thread(target=self._wait_for, args=(self._pool,), daemon=True).start()

    def _wait_for(self, pool: ProcessPoolExecutor) -> None:
        with suppress(RuntimeError):  # the pool was shut down before the processes had started
            wait_for_all([pool.submit(os.getpid) for _ in range(self._processes)])
            self._is_ready.set()
            logger.info("tokenizing in %d processes", self._processes)


def cores() -> int:
    """Return the number of cores that this process may use: by its CPU affinity and its container's quota
    (cgroup v2)."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):
        return allowed


def _initialize(request: DataRequest, encoder: Encoder, heldout_below: int | None, out: Path | None) -> None:
    """Initialize a worker process."""
    global _sampler
    output.install()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends at a Ctrl-C, and this process with it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process for each core is enough
    _sampler = Sampler(request, encoder, heldout_below, out)
    gc.freeze()  # imported objects stay, so the garbage collector need not scan them again
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent process ends; without this, a killed parent would leave its workers waiting for
    ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)


def _samples(chunk: Chunk) -> Samples:
    assert _sampler is not None
    return _sampler.samples(chunk)
