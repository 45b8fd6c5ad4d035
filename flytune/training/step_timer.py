"""Time of a training step by its parts: data, forward, backward, update, evaluation."""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from flytune import patches
from flytune.records.training import PARTS


class Clock:
    """Clock that measures one part at a time, so that the parts add up to the time between two readings.

    On a GPU, where the host runs ahead, the marks between parts are CUDA events: recorded into the stream
    without waiting for it, and read when a step is logged. A part is then the time in which the GPU worked on
    it or waited for it; data that is fetched while the GPU works costs nothing.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._marks = [("other", self._mark())]

    def enter(self, part: str) -> None:
        """End the running part and begin `part`, one of PARTS."""
        self._marks.append((part, self._mark()))

    @contextmanager
    def during(self, part: str, then: str) -> Iterator[None]:
        """Measure the block as `part`; `then` begins after it."""
        self.enter(part)
        yield
        self.enter(then)

    def read(self) -> dict[str, float]:
        """Return the seconds of each part since the last reading; the running part continues."""
        self.enter(self._marks[-1][0])
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, start), (_, end) in pairwise(self._marks):
            seconds[part] += self._between(start, end)
        del self._marks[:-1]
        return seconds

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if not self._on_gpu:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def time_engine(engine: Any, clock: Clock) -> None:
    """Make a DeepSpeed engine, which clips and updates within the last backward pass, report its `step` as
    the update."""
    step = engine.step

    @functools.wraps(step)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock.during("update", then="update"):
            return step(*args, **kwargs)

    patches.deepspeed.ENGINE_STEP.on(engine, timed)
