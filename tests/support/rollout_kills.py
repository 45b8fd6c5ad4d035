"""Runs with drawn answers that are killed within a step. Imports little, because new processes import it."""

import os
import signal

from flytune.objectives import drawing_engines, rollout_steps, student_answers
from tests.support import saved_runs
from tests.support.process_kills import kill_once_saved


def maker_of(recipe):
    """Return the class that draws the answers of a recipe's steps, and the name of its method for a step."""
    if recipe.objective.name == "grpo":
        return rollout_steps.Rollouts, "batches"
    return student_answers.StudentAnswers, "rows"


def fit_and_die(recipe, inputs, out, where, step):
    """Run until `step`, and be killed while its answers are drawn or judged, or when they are recorded and
    not trained yet."""
    maker, name = maker_of(recipe)
    made, state = getattr(maker, name), {}

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

    setattr(maker, name, batches)
    if where == "generation":
        drawing_engines.draw_evaluated = killing(drawing_engines.draw_evaluated)
    if where == "reward":
        rollout_steps.RewardProcess.values = killing(rollout_steps.RewardProcess.values)
    return saved_runs.fit(recipe, inputs, out)


def fit_without_drawing(recipe, inputs, out, step):
    """Run, and be killed if the answers of `step` are drawn again."""
    maker, _ = maker_of(recipe)
    drawn = maker._drawn

    def draw(self, trainer, now, *arguments):
        if now == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return drawn(self, trainer, now, *arguments)

    maker._drawn = draw
    return saved_runs.fit(recipe, inputs, out)


def fit_and_die_with_answers_of(recipe, inputs, out, step):
    """Run, and be killed when the answers of `step` are recorded, and are not trained yet."""
    made = rollout_steps.Rollouts.batches

    def batches(self, trainer, rows):
        found = made(self, trainer, rows)
        if trainer.state.global_step + 1 == step:
            trainer.run.saver.settle()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    rollout_steps.Rollouts.batches = batches
    return saved_runs.fit(recipe, inputs, out)


def fit_and_note_drawn(recipe, inputs, out):
    """Return the result of a run, and the steps whose answers it has drawn itself."""
    drawn, steps = rollout_steps.Rollouts._drawn, []

    def draw(self, trainer, now, *arguments):
        steps.append(now)
        return drawn(self, trainer, now, *arguments)

    rollout_steps.Rollouts._drawn = draw
    return saved_runs.fit(recipe, inputs, out), steps
