"""The sections of a recipe that say where a run happens and what is kept of it, field by field."""

import tempfile
from typing import Annotated, Literal

from pydantic import Field

from flytune.sections import Positive
from flytune.strict import Strict


class Hardware(Strict):
    """Wishes; the planner picks the shape."""

    shape: str = "auto"
    """A row of shapes.yaml, or `auto`: the cheapest that fits."""
    accelerator: str | None = None
    """Only shapes with it: cpu, T4, A100-80GB ..."""
    max_price_per_hour: Annotated[float, Field(gt=0)] | None = None
    """Of the whole shape, in the currency of shapes.yaml."""
    spot: bool | None = None
    """Only spot shapes (true), only others (false)."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Of training, all attempts together: then the run saves, exports and evaluates what there is."""
    max_price: Annotated[float, Field(gt=0)] | None = None
    """Of training, in the currency of shapes.yaml; used up as max_hours is."""


class Checkpoints(Strict):
    """Saved states of a run, from which it goes on after a failure."""

    save_steps: Positive | Literal["auto"] | None = None
    """Optimizer steps between checkpoints; `auto`: as often as loses least; none are written when not set."""
    save_total_limit: Positive = 2
    """The newest so many are kept, and beside them the one of the lowest eval_loss, where evaluation.eval_steps scores."""
    folder: str | None = None
    """A folder that every attempt and node sees (mounted into the pods, absolute), or an fsspec address. When not set: on a
    cluster below its raw output location, elsewhere `.checkpoints`."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] | None = None
    """Runs of this name go on from each other's checkpoints; when not set, runs of equal recipe (less hardware) and data do."""

    @property
    def is_mounted(self) -> bool:
        """Whether it is not on the pod's own disk, as far as its path says."""
        return self._is_address or (self.place.startswith("/") and not self.place.startswith("/tmp/"))

    @property
    def place(self) -> str:
        """`folder`; where it is not set and tasks.folders.placed has set none, one of this machine."""
        return self.folder or ".checkpoints"

    @property
    def _is_address(self) -> bool:
        return self.folder is None or "://" in self.folder

    @property
    def home(self) -> str:
        """What is kept on file systems goes here: `folder`, or a folder on the pod's own disk where that is an address."""
        return f"{tempfile.gettempdir()}/flytune-runs" if "://" in self.place else self.place

    @property
    def copies_on_disk(self) -> int:
        """Checkpoints that a pod's own disk holds at most: for an address, the one that waits to be stored."""
        copies = self.save_total_limit + 1 if not self.is_mounted else 1 if self._is_address else 0
        return copies if self.save_steps else 0


class Tracking(Strict):
    """Experiment trackers that are told of each step, beside the artifact's steps.jsonl."""

    report_to: list[Literal["wandb", "mlflow", "tensorboard"]] = Field(default=[])
    project: str = "flytune"
    """Of Weights & Biases; the experiment, for MLflow."""


class Publish(Strict):
    """Where the artifact goes beside Flyte's own store."""

    address: str | None = None
    """A folder or fsspec address; the artifact is put below it, under the recipe's name and a hash of its content."""


class Notify(Strict):
    """Who is told how a run ended."""

    on: list[Literal["succeeded", "failed"]] = Field(default=["failed"])
    email: list[str] = Field(default=[])
    """Flyte's own mail; by launch plans (scheduled runs) alone."""
    slack: list[str] = Field(default=[])
    """Mail addresses of Slack channels; by launch plans alone."""
    webhook: bool = False
    """Post to the address in the secret FLYTUNE_WEBHOOK (cluster.yaml), in Slack's form; from every run."""
