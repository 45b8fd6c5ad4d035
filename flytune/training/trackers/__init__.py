"""Experiment trackers, by name, around transformers' callbacks. A new one is a file in this folder, named as
in a recipe."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flytune.errors import TrainingError
from flytune.recipe import TRACKER_NAMES, Recipe
from flytune.training.trackers.base import Tracker

TRACKERS: dict[str, Tracker] = {
    name: import_module(f"flytune.training.trackers.{name}").TRACKER for name in TRACKER_NAMES
}


def arguments(recipe: Recipe, checkpoints: Path) -> dict[str, Any]:
    """Return keyword arguments of SFTConfig for the recipe's trackers; set the environment variables of their
    callbacks.

    Raises:
        TrainingError: a tracker's package is missing, or the tracker denies access.
    """
    project = recipe.tracking.project
    reported = [TRACKERS[name] for name in recipe.tracking.report_to]
    for tracker in reported:
        _check_installed(tracker)
        os.environ |= tracker.variables(project, checkpoints)
    # Only the first process reports. It checks its access now, before a large model is loaded.
    if os.environ.get("RANK", "0") == "0":
        for tracker in reported:
            if problem := tracker.access_problem(project):
                raise TrainingError(
                    f"tracking.report_to: {tracker.name} cannot be reported to, so the run does not start: "
                    f"{problem}"
                )
    return {"report_to": [tracker.name for tracker in reported] or "none", "run_name": recipe.name}


def _check_installed(tracker: Tracker) -> None:
    spec = find_spec(tracker.name)
    # A folder ./wandb, in which offline runs are kept, looks like a package without a file.
    if spec is None or spec.origin is None:
        raise TrainingError(
            f"tracking.report_to: {tracker.name} is not installed here, so the run does not start; "
            f"install {tracker.requirement} (into the training image, for a run on a cluster), "
            f"or take {tracker.name} out of the recipe"
        )


def run_ids() -> dict[str, str]:
    """Return the run's id at each tracker that this process reports to, by which a later attempt resumes the
    same run."""
    loaded = [tracker for tracker in TRACKERS.values() if tracker.name in sys.modules]
    ids = {tracker.name: tracker.run_id(sys.modules[tracker.name]) for tracker in loaded}
    return {name: run_id for name, run_id in ids.items() if run_id is not None}


def resume_runs(ids: dict[str, str]) -> None:
    """Make the trackers resume the runs with these ids when the Trainer starts them, instead of those of an
    earlier call."""
    for name in _resumed:
        os.environ.pop(name, None)
    _resumed.clear()
    for tracker, run_id in ids.items():
        _resumed.update(TRACKERS[tracker].resume_variables(run_id))
    os.environ |= _resumed


def finish(report_to: list[str]) -> None:
    """Close the runs of these trackers."""
    resume_runs({})
    for name in report_to:
        TRACKERS[name].close()


_resumed: dict[str, str] = {}
"""Environment variables that make the trackers resume a run."""
