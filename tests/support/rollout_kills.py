"""Runs with drawn answers that are killed within a step. Imports little, because new processes import it."""

import os
import signal

from flytune.objectives import rollout_steps
from tests.support import saved_runs
from tests.support.process_kills import kill_once_saved


def fit_and_die(recipe, inputs, out, where, step):
    """Run until `step`, and be killed while its answers are drawn or judged, or when they are recorded and not trained yet."""
    made, state = rollout_steps.Rollouts.batches, {}

    def batches(self, trainer, rows):
        state["now"] = trainer.state.global_step + 1
        found = made(self, trainer, rows)
        if where == "update" and state["now"] == step:
            kill_once_saved(recipe, step - 1)
        return found

    def killing(function):
        def call(*arguments):
            if state.get("now") == step:
                kill_once_saved(recipe, step - 1)
            return function(*arguments)

        return call

    rollout_steps.Rollouts.batches = batches
    if where == "generation":
        rollout_steps._evaluated = killing(rollout_steps._evaluated)
    if where == "reward":
        rollout_steps.RewardProcess.values = killing(rollout_steps.RewardProcess.values)
    return saved_runs.fit(recipe, inputs, out)


def fit_without_drawing(recipe, inputs, out, step):
    """Run, and be killed if the answers of `step` are drawn again."""
    drawn = rollout_steps.Rollouts._drawn

    def draw(self, trainer, now, rows):
        if now == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return drawn(self, trainer, now, rows)

    rollout_steps.Rollouts._drawn = draw
    return saved_runs.fit(recipe, inputs, out)
