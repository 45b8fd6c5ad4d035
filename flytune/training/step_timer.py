"""Where the time of training goes: a clock that knows which part of a step runs."""

import functools
import time
from itertools import pairwise
from typing import Any

from flytune.records.training import PARTS


class Clock:
    """Time by part. One part runs at a time, so that all parts together are the time between two readings.

    On a GPU, where the host runs ahead, the marks between parts are CUDA events: recorded into the stream without waiting
    for it, and read when a step is logged. A part is then the time in which the GPU worked on it or waited for it; data
    that is fetched while the GPU works costs nothing.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._marks = [("other", self._mark())]

    def enter(self, part: str) -> None:
        """From now on `part` runs, one of PARTS."""
        self._marks.append((part, self._mark()))

    def read(self) -> dict[str, float]:
        """Seconds of each part since the last reading; the part that runs goes on."""
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


def watch(trainer: Any, clock: Clock) -> None:
    """Makes methods of a trainer, whose model is wrapped by now, tell the clock which part begins; no callback sees it.

    transformers' Trainer fetches all micro batches of an optimizer step in get_batch_samples; training_step is forward
    (compute_loss) and backward, gradient reduction included; what follows, up to on_step_end, is the update: clipping,
    optimizer, schedule. DeepSpeed clips and updates within the last backward, in its engine's `step`.
    """

    def announce(owner: Any, name: str, before: str, after: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def announced(*args: Any, **kwargs: Any) -> Any:
            clock.enter(before)
            found = method(*args, **kwargs)
            clock.enter(after)
            return found

        setattr(owner, name, announced)

    announce(trainer, "get_batch_samples", "data", "other")
    announce(trainer, "training_step", "forward", "update")
    announce(trainer, "compute_loss", "forward", "backward")
    if trainer.is_deepspeed_enabled:
        announce(trainer.model_wrapped, "step", "update", "update")
