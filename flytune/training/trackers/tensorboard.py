"""TensorBoard."""

from pathlib import Path

from flytune.training.trackers.base import Tracker


class TensorBoard(Tracker):
    """A folder for each run, which a later attempt goes on to write into."""

    name = "tensorboard"
    requirement = "flytune[tensorboard]"

    def variables(self, project: str, checkpoints: Path) -> dict[str, str]:
        # Outside of the checkpoints, which are deleted at the end of the run.
        return {"TENSORBOARD_LOGGING_DIR": str(checkpoints.parent / "tensorboard" / checkpoints.name)}


TRACKER = TensorBoard()
