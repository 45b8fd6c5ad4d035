"""Experiment trackers: set-up and clean-up around transformers' callbacks, which report to them."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flytune.errors import TrainingError
from flytune.recipe import Recipe


def arguments(recipe: Recipe, checkpoints: Path) -> dict[str, Any]:
    """Return keyword arguments of SFTConfig for the recipe's trackers, and set the environment variables of their callbacks.

    Raises:
        TrainingError: a tracker's package is missing, or the tracker denies access.
    """
    tracking = recipe.tracking
    for tracker in tracking.report_to:
        spec = find_spec(tracker)
        # A folder ./wandb, in which offline runs are kept, looks like a package without a file.
        if spec is None or spec.origin is None:
            raise TrainingError(
                f"tracking.report_to: {tracker} is not installed here, so the run does not start; install flytune[{tracker}] "
                f"(into the training image, for a run on a cluster), or take {tracker} out of the recipe"
            )
    if "wandb" in tracking.report_to:
        os.environ |= {"WANDB_PROJECT": tracking.project, "WANDB_RUN_GROUP": checkpoints.name}
    if "mlflow" in tracking.report_to:
        os.environ["MLFLOW_EXPERIMENT_NAME"] = tracking.project
    if "tensorboard" in tracking.report_to:
        # Outside of the checkpoints, which are deleted at the end of the run.
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(checkpoints.parent / "tensorboard" / checkpoints.name)
    # Only the first process reports. It checks its access now, before a large model is loaded.
    if os.environ.get("RANK", "0") == "0":
        for tracker in tracking.report_to:
            if tracker in _ACCESS and (problem := _ACCESS[tracker](tracking.project)):
                raise TrainingError(
                    f"tracking.report_to: {tracker} cannot be reported to, so the run does not start: {problem}"
                )
    return {"report_to": list(tracking.report_to) or "none", "run_name": recipe.name}


def run_ids() -> dict[str, str]:
    """Return the run's id at each tracker that this process reports to, so that a later attempt can resume the same run."""
    found = {}
    if (run := getattr(sys.modules.get("wandb"), "run", None)) is not None:
        found["wandb"] = str(run.id)
    if "mlflow" in sys.modules and (run := sys.modules["mlflow"].active_run()) is not None:
        found["mlflow"] = str(run.info.run_id)
    return found


def resume_runs(ids: dict[str, str]) -> None:
    """Make the trackers resume the runs with these ids when the Trainer starts them, instead of those of an earlier call."""
    for name in _resumed:
        os.environ.pop(name, None)
    _resumed.clear()
    for tracker, run_id in ids.items():
        _resumed.update({name: value or run_id for name, value in _SAME_RUN[tracker].items()})
    os.environ |= _resumed


def finish(report_to: list[str]) -> None:
    """Close the runs that transformers leaves open, which a next run of this process would otherwise continue."""
    resume_runs({})
    if "wandb" in report_to:
        import wandb

        wandb.finish()


_resumed: dict[str, str] = {}
"""Environment variables that make the trackers resume a run."""
# Variables by which each tracker resumes a run; "" is the place of the run's id. A run of TensorBoard is a folder.
_SAME_RUN = {"wandb": {"WANDB_RUN_ID": "", "WANDB_RESUME": "allow"}, "mlflow": {"MLFLOW_RUN_ID": ""}}


def _wandb(project: str) -> str | None:
    """Return why the run cannot report to Weights & Biases, and what to do; None if it can."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return None
    import wandb

    try:
        reason = None if wandb.login(prompt=False) else "no key was found"
    except wandb.Error as error:
        reason = " ".join(str(error).split())
    return reason and f"{reason}; set WANDB_API_KEY, or WANDB_MODE=offline to keep the run in a folder for `wandb sync`"


def _mlflow(project: str) -> str | None:
    """Return why the run cannot report to MLflow, and what to do; None if it can, to the experiment made here."""
    import mlflow

    try:
        mlflow.set_experiment(project)
    except mlflow.MlflowException as error:
        return f"{' '.join(str(error).split())[:300]}; set MLFLOW_TRACKING_URI to a server that answers"
    return None


_ACCESS = {"wandb": _wandb, "mlflow": _mlflow}
