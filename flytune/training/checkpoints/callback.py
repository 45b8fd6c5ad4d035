"""What the Trainer tells a saver."""

import shutil
from pathlib import Path
from typing import Any

from flytune.errors import TrainingError


def callback(saver: Any) -> Any:
    """A TrainerCallback of a checkpoints.Saver."""
    from transformers import TrainerCallback

    class Saving(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Without a trainer_state.json, the Trainer would start over with the weights of the checkpoint, and say nothing.
            if state.global_step != saver.resumed_step:
                raise TrainingError(
                    f"rank {args.process_index}: the checkpoint is of step {saver.resumed_step}, and training would go on from "
                    f"{state.global_step}; the run does not go on by itself"
                )

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if control.should_save:
                # So that the log that is saved ends with this step, and the next line begins behind it.
                control.should_log = True
            if state.global_step == saver.resumed_step + 1 and args.local_process_index == 0:
                # What was fetched has been read by all of this node: a step is behind them.
                shutil.rmtree(Path(args.output_dir) / "resumed", ignore_errors=True)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saver.settle()

    return Saving()
