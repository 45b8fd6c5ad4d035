"""What a training run did, step by step, as it happens."""

import math
import time
from typing import Any

from flytune.errors import TrainingError
from flytune.records import Step
from flytune.strategies.strategy import Strategy


class Recorder:
    """Collects the run's steps as the Trainer logs them."""

    def __init__(self, strategy: Strategy) -> None:
        self.steps: list[Step] = []
        self.trainer: Any = None
        """Set once it is built: callbacks are built before it."""
        self.strategy = strategy
        self._last_time = 0.0
        self._last_tokens = 0

    def begin(self) -> None:
        self._last_time = time.monotonic()

    def record(self, step: int, epoch: float, logs: dict[str, float]) -> None:
        """Takes one log line of the Trainer.

        Raises:
            TrainingError: the loss is not a number; going on would only cost money.
        """
        if "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise TrainingError(
                f"step {step}: the loss is {logs['loss']}; the run does not go on and nothing is stored. Lower "
                "training.learning_rate, or look at the data of this step; float16 overflows where bfloat16 does not"
            )
        now, tokens = time.monotonic(), int(logs.get("num_tokens", 0))
        self.steps.append(
            Step(
                step=step,
                epoch=epoch,
                loss=logs["loss"],
                learning_rate=logs["learning_rate"],
                grad_norm=logs.get("grad_norm"),
                seconds=now - self._last_time,
                tokens=tokens - self._last_tokens,
                memory_bytes=peak_memory(),
            )
        )
        self._last_time, self._last_tokens = now, tokens


def callback(recorder: Recorder) -> Any:
    """The recorder as the Trainer knows it."""
    from transformers import TrainerCallback

    class Recording(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Only now is the model wrapped: a sharding that silently did not happen would train wrong or not fit.
            if problem := recorder.strategy.check(recorder.trainer):
                name = recorder.strategy.name
                raise TrainingError(f"rank {args.process_index}: sharding {name} did not take hold: {problem}")
            recorder.begin()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
            recorder.record(state.global_step, state.epoch or 0.0, logs or {})

    return Recording()


def peak_memory() -> int:
    """Bytes that this process has held at most: on its fullest GPU, or in host memory without any."""
    import torch

    if torch.cuda.is_available():
        return max(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
