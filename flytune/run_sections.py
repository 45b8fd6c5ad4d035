"""The sections of a recipe that say how a run is judged, where it happens and what is kept of it, field by field."""

import re
import tempfile
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from flytune.sections import Positive
from flytune.strict import Strict

HUB_ADDRESS = re.compile(r"hf://(?!(?:datasets|spaces|buckets)/)[\w-][\w.-]*/[\w.-]+")
"""A model repository on the Hugging Face Hub."""


class HarnessTask(Strict):
    """A task or group of lm-evaluation-harness."""

    name: Annotated[str, Field(min_length=1)]
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """The task's own when not set."""
    limit: Positive | None = None
    """Documents of each task at most."""


class Guard(Strict):
    """What training must not make worse."""

    task: str
    metric: str | None = None
    """The task's first when not set."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """That it may fall, in the metric's own unit."""


class Evaluation(Strict):
    """What is asked of the exported model, in a task of its own."""

    max_samples: Positive = 500
    """Held-out samples to score at most."""
    eval_steps: Positive | None = None
    """Optimizer steps between scores of the model in training on those samples; none when not set."""
    batch_size: Positive = 8
    sample_answers: Annotated[int, Field(ge=0)] = 16
    """Held-out prompts that base and tuned model answer side by side."""
    max_new_tokens: Positive = 128
    tasks: list[HarnessTask] = Field(default=[])
    """Of lm-evaluation-harness; asked of base and tuned model."""
    include_path: str | None = None
    """A folder of tasks of your own, in the harness's YAML (recipes/tasks), or its address."""
    apply_chat_template: bool = False
    """Ask the tasks as chats."""
    task_shards: Positive = 1
    """Parts that the documents of each task are cut into; each is a pod of its own."""
    shape: str | None = None
    """A row of shapes.yaml to evaluate on; the one that trains when not set."""
    must_not_fall: list[Guard] = Field(default=[])
    """Where one of them falls, the model is stored but not published or promoted."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        """`gsm8k` is `{name: gsm8k}`."""
        return [{"name": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value

    @model_validator(mode="after")
    def _guards_are_asked(self) -> Self:
        if self.must_not_fall and not self.tasks:
            raise ValueError("must_not_fall guards what evaluation.tasks asks, and it asks nothing")
        return self


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
    """A folder or fsspec address; the artifact is put below it, under the recipe's name and a hash of its content. Or
    hf://owner/name, a repository on the Hugging Face Hub, with a revision for each run."""
    private: bool = True
    """Of a repository on the hub that does not exist yet."""
    every_save: bool = False
    """Publish what each checkpoint has trained as well, while training goes on; on the hub alone."""

    @model_validator(mode="after")
    def _hub_address(self) -> Self:
        on_hub = (self.address or "").startswith("hf://")
        if on_hub and not HUB_ADDRESS.fullmatch(self.address or ""):
            raise ValueError(f"address: {self.address} is no model repository of the hub; write hf://owner/name")
        if self.every_save and not on_hub:
            raise ValueError("every_save publishes to the hub alone; give address: hf://owner/name")
        return self


class Notify(Strict):
    """Who is told how a run ended."""

    on: list[Literal["succeeded", "failed"]] = Field(default=["failed"])
    email: list[str] = Field(default=[])
    """Flyte's own mail; by launch plans (scheduled runs) alone."""
    slack: list[str] = Field(default=[])
    """Mail addresses of Slack channels; by launch plans alone."""
    webhook: bool = False
    """Post to the address in the secret FLYTUNE_WEBHOOK (cluster.yaml), in Slack's form; from every run."""
