"""Weights & Biases."""

import os
from pathlib import Path
from types import ModuleType

from flytune.training.trackers.base import Tracker


class WeightsAndBiases(Tracker):
    """A server, or a folder of offline runs for `wandb sync`."""

    name = "wandb"
    requirement = "flytune[wandb]"

    def variables(self, project: str, checkpoints: Path) -> dict[str, str]:
        return {"WANDB_PROJECT": project, "WANDB_RUN_GROUP": checkpoints.name}

    def access_problem(self, project: str) -> str | None:
        if os.environ.get("WANDB_MODE", "online") != "online":
            return None
        import wandb

        try:
            if wandb.login(prompt=False):
                return None
            reason = "no key was found"
        except wandb.Error as error:
            reason = " ".join(str(error).split())
        return (
            f"{reason}; set WANDB_API_KEY, or WANDB_MODE=offline to keep the run in a folder for `wandb sync`"
        )

    def run_id(self, library: ModuleType) -> str | None:
        # A folder ./wandb may have been loaded in its place.
        run = getattr(library, "run", None)
        return run and str(run.id)

    def resume_variables(self, run_id: str) -> dict[str, str]:
        return {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow"}

    def close(self) -> None:
        import wandb

        wandb.finish()


TRACKER = WeightsAndBiases()
