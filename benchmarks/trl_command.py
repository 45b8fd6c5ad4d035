"""TRL's own command (`trl sft`), run in this process up to its last step, with the time and memory of each.

python -m benchmarks.trl_command STEPS.json --model_name_or_path ... (the options of `trl sft`)
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import transformers


class Meter(transformers.TrainerCallback):
    """Notes when each step has ended and the peak of memory until then; writes the notes after the last step,
    and exits."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.began = psutil.Process().create_time()
        self.steps: list[dict[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the end of a step, in seconds since the process began."""
        import torch

        memory = {}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            memory = {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }
        self.steps.append({"step": state.global_step, "seconds": time.time() - self.began} | memory)
        if state.global_step == state.max_steps:
            self.file.write_text(json.dumps(self.steps), encoding="utf-8")
            os._exit(0)


def measure_steps(file: Path) -> None:
    """Have the next Trainer of this process note its steps in `file`."""
    from transformers import trainer

    trainer.DEFAULT_CALLBACKS.append(Meter(file))


if __name__ == "__main__":
    measure_steps(Path(sys.argv[1]))
    sys.argv = ["trl sft", *sys.argv[2:]]
    runpy.run_module("trl.scripts.sft", run_name="__main__")
