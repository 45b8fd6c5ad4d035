"""Trainer callbacks of a run, and their order."""

from typing import Any

from flytune.data import order
from flytune.training.checkpoints import resume
from flytune.training.loss_guards import MOST_ZERO


def in_order(trainer: Any, defaults: list[Any]) -> list[Any]:
    """Return all callbacks of a RunTrainer, in the order in which the Trainer calls them.

    Args:
        defaults: transformers' own: DefaultFlowCallback, which decides by the arguments at which steps the
            Trainer logs, saves and stops, then the trackers'.
    """
    # The log first: trackers report what it adds to the logs. The steps' end last: it adds to what
    # DefaultFlowCallback decided.
    return [log_callback(trainer), *defaults, order.callback(trainer.train_dataset), step_callback(trainer)]


def log_callback(trainer: Any) -> Any:
    """Return the callback that checks and records each log line of a RunTrainer."""
    from transformers import TrainerCallback

    run = trainer.run

    class Log(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
        ) -> None:
            # The summary at the end of training has no loss of a step.
            if logs and "loss" in logs:
                trainer.guard.check(
                    state.global_step, run.saver.settled_step, logs["loss"], logs.get("grad_norm")
                )
                run.recorder.record(state.global_step, state.epoch or 0.0, logs)
            elif logs and "train_runtime" in logs:
                run.recorder.summarize(logs)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.recorder.end()

    return Log()


def step_callback(trainer: Any) -> Any:
    """Return the callback that begins and ends training, and decides after each step whether to score, save
    and stop."""
    from transformers import TrainerCallback

    run = trainer.run

    class Steps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Only now is the model wrapped.
            run.recorder.begin(trainer)
            trainer.learning.begin(trainer)
            resume.check_resumed(run.saver.resumed_step, state.global_step, args)
            # A checkpoint's state has the intervals of the recipe that wrote it.
            state.compute_steps(args, state.max_steps)
            run.stopper.begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step, is_last = state.global_step, state.global_step >= state.max_steps
            run.attempt.end_step(step)
            ends_epoch = trainer.train_dataset.ends_epoch(step)
            is_scored = run.recorder.end_step(step, is_last, ends_epoch)
            if is_scored:
                run.stopper.early.count(step, run.recorder.eval_loss)
            run.saver.end_step(step)
            save, stop = run.stopper.end_step(step, args, is_last)
            is_due = control.should_save or (ends_epoch and run.recipe.checkpoints.save_steps == "epoch")
            control.should_save = (is_due and not stop) or save
            # A step that is saved is logged, so that the log in the checkpoint ends with it. So is the last
            # one: the steps since the line before it belong to the run's figures, and the guard looks at
            # them.
            control.should_log = control.should_log or is_scored or control.should_save or stop or is_last
            control.should_training_stop = control.should_training_stop or stop
            if control.should_log or is_last or step % MOST_ZERO == 0:
                trainer.learning.check(step)
            run.watch.end_step(step)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.saver.settle()

    return Steps()
