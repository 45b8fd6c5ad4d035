"""Runs of a tiny model that write checkpoints, and that are killed at a step or in the export."""

import os

from flytune.hardware import shape_named
from flytune.objectives import objective_of
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.training import loop, step_log
from tests.support.process_kills import kill_once_saved
from tests.support.tiny import tiny_recipe

KNOWN = "reference"
"""Folder beside the rows with what a frozen model says of them."""


def known(recipe, inputs):
    """Return the folder of what a teacher says of the rows; None of other objectives."""
    return inputs / KNOWN if objective_of(recipe).teacher() else None


def recipe_for(inputs, sharding, folder, **changes):
    usual = {
        "sharding": sharding,
        "training.max_steps": 4,
        "hardware.shape": "cpu-1" if sharding == "none" else "cpu-2",
    }
    usual |= {"checkpoints.save_steps": 1, "checkpoints.folder": str(folder)}
    return Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", usual | changes))


def fit(recipe, inputs, out, nodes=1, die_at=None):
    """Run once, with each rank as a node of its own if there are two; with `die_at`, all are killed at that
    step."""
    if nodes == 2:
        os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": os.environ["RANK"]}
    record = step_log.Recorder.record

    def record_and_die(self, step, epoch, logs):
        record(self, step, epoch, logs)
        if step == die_at:
            kill_once_saved(recipe, die_at - 1)

    step_log.Recorder.record = record_and_die
    plan = planner.make(recipe)
    return loop.fit(
        recipe, plan, shape_named(plan.shape), inputs / "dataset", out, reference=known(recipe, inputs)
    )


def fit_and_die_in_the_export(recipe, inputs, out):
    loop.write.write = lambda *arguments: kill_once_saved(recipe, 4)
    fit(recipe, inputs, out)
