"""Experiment trackers. transformers' callbacks report to them; here stands what these need, and what they leave open."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flytune.errors import TrainingError
from flytune.recipe.recipe import Recipe


def arguments(recipe: Recipe, checkpoints: Path) -> dict[str, Any]:
    """Keyword arguments of SFTConfig for the recipe's trackers; what their callbacks read from the environment is set.

    Raises:
        TrainingError: a tracker's package is missing, or the tracker does not let the run in.
    """
    tracking = recipe.tracking
    for tracker in tracking.report_to:
        spec = find_spec(tracker)
        # A folder ./wandb, which is where its runs wait, looks like a package without a file.
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
        # Not among the checkpoints, which go when the run is over.
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(checkpoints.parent / "tensorboard" / checkpoints.name)
    # The first process alone reports. It asks for access now, and not when a large model is loaded.
    if os.environ.get("RANK", "0") == "0":
        for tracker in tracking.report_to:
            if tracker in _ACCESS and (problem := _ACCESS[tracker](tracking.project)):
                raise TrainingError(
                    f"tracking.report_to: {tracker} cannot be reported to, so the run does not start: {problem}"
                )
    return {"report_to": list(tracking.report_to) or "none", "run_name": recipe.name}


def run_ids() -> dict[str, str]:
    """The run's id at each tracker that it reports to from this process, for an attempt that is to go on in the same run."""
    found = {}
    if (run := getattr(sys.modules.get("wandb"), "run", None)) is not None:
        found["wandb"] = str(run.id)
    if "mlflow" in sys.modules and (run := sys.modules["mlflow"].active_run()) is not None:
        found["mlflow"] = str(run.info.run_id)
    return found


def go_on(ids: dict[str, str]) -> None:
    """Has the trackers go on in these runs, and no longer in an earlier one's, when the Trainer starts them."""
    for name in _going_on:
        os.environ.pop(name, None)
    _going_on.clear()
    for tracker, run_id in ids.items():
        _going_on.update({name: value or run_id for name, value in _SAME_RUN[tracker].items()})
    os.environ |= _going_on


def finish(report_to: list[str]) -> None:
    """Closes what transformers leaves open: a next run of this process would go on in the same run of the tracker."""
    go_on({})
    if "wandb" in report_to:
        import wandb

        wandb.finish()


_going_on: dict[str, str] = {}
# What names a tracker's run to it, and what else it wants to hear; "" stands for the run's id. TensorBoard's run is a folder.
_SAME_RUN = {"wandb": {"WANDB_RUN_ID": "", "WANDB_RESUME": "allow"}, "mlflow": {"MLFLOW_RUN_ID": ""}}


def _wandb(project: str) -> str | None:
    """What keeps the run out of Weights & Biases, and what to do; nothing if it may report."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return None
    import wandb

    try:
        reason = None if wandb.login(prompt=False) else "no key was found"
    except wandb.Error as error:
        reason = " ".join(str(error).split())
    return reason and f"{reason}; set WANDB_API_KEY, or WANDB_MODE=offline to keep the run in a folder for `wandb sync`"


def _mlflow(project: str) -> str | None:
    """What keeps the run out of MLflow, and what to do; nothing if it may report, to the experiment that there now is."""
    import mlflow

    try:
        mlflow.set_experiment(project)
    except mlflow.MlflowException as error:
        return f"{' '.join(str(error).split())[:300]}; set MLFLOW_TRACKING_URI to a server that answers"
    return None


_ACCESS = {"wandb": _wandb, "mlflow": _mlflow}
