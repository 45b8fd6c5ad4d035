"""The sections of a recipe, field by field; `data`, `method` and `training` have files of their own.

Field names are those of transformers, TRL and PEFT; other fields state intent: the global batch, never
accumulation steps. A field that is added after 0.1.0 is marked with its version (Recipe.key).
"""

import re
import tempfile
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from flytune import limits
from flytune.recipe.rope import RopeScaling
from flytune.schema import PathOrAddress, Positive, Strict, omitted


def _with_effect(value: float) -> float:
    if 0 < value < limits.LEAST_FACTOR:
        raise ValueError(
            f"{value:g} is too small to have an effect; write 0, or {limits.LEAST_FACTOR:g} or more"
        )
    return value


Fraction = Annotated[float, Field(gt=0, lt=1)]
Factor = Annotated[float, Field(ge=0, le=limits.FACTOR), AfterValidator(_with_effect)]
"""Factor of a term of the loss, which 0 leaves out."""
TrackerName = Literal["wandb", "mlflow", "tensorboard"]
"""A tracker; each is a file in flytune/training/trackers."""
TRACKER_NAMES: tuple[TrackerName, ...] = get_args(TrackerName)


class Section(Strict):
    """A part of a recipe."""

    def changed(self, *names: str) -> list[str]:
        """Return those of some fields (by default of all) whose values are not the defaults: a recipe that
        went through JSON carries every field, and only changed ones are a decision."""
        fields = type(self).model_fields
        return [name for name in names or fields if getattr(self, name) != fields[name].get_default()]

    def refusals(self, recipe: Any) -> list[str]:
        """List what a plan refuses of it beside the rest of the recipe, a line each."""
        return []


class Model(Section):
    """The base model."""

    name_or_path: PathOrAddress
    """A Hugging Face id, or a folder with config.json, safetensors and tokenizer files."""
    revision: str | None = None
    """Commit, tag or branch on the hub; a commit is the only one that never changes. Not for folders."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the loaded and exported weights."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Implementation of attention in transformers."""
    trust_remote_code: bool = False
    """Permission to run Python code of the model's repository."""
    extra_special_tokens: list[Annotated[str, Field(min_length=1, max_length=1000)]] = Field(
        default=[], max_length=limits.ADDED_TOKENS
    )
    """Special tokens to add to the vocabulary, such as ChatML's marks; their rows of embedding and head are
    trained."""
    rope_scaling: RopeScaling | None = omitted(None)
    """Scaling of the rotary embedding, for samples longer than the base was made for
    (docs/long-sequences.md); by default the base's own."""

    vision: Literal["frozen", "train"] = "frozen"
    """Part of a vision-language model that reads images, with what joins it to the language model: `frozen`,
    or trained too (method full)."""

    def refusals(self, recipe: Any) -> list[str]:
        if self.vision == "frozen" or recipe.data.images:
            return []
        return [
            "model.vision: train: nothing reads images without data.images: true; write that, or "
            "leave vision out"
        ]

    @model_validator(mode="after")
    def _tokens_once(self) -> Self:
        if len(set(self.extra_special_tokens)) < len(self.extra_special_tokens):
            raise ValueError("extra_special_tokens: a token is listed twice; list each once")
        return self


class Sharding(Section):
    """The distribution of model and optimizer over processes."""

    name: Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp", "device_map", "auto"]
    """Name of the way, or `auto`: the plan chooses it and its offload, and says why."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Storage of sharded states that are not in use: the GPU (`none`), host memory, or the node's NVMe
    disk."""
    replicas: Positive | Literal["nodes", "auto"] = omitted(1)
    """Groups of processes that each hold all states, which fsdp then shards inside a group: a number, `nodes`
    for one on each node, or `auto`: the plan takes the faster one that fits."""
    sequence_parallel: Positive = omitted(1)
    """Processes of a node that divide the positions of each sample among themselves, for samples that are too
    long for one GPU (docs/long-sequences.md)."""
    # Flyte's type for any JSON object.
    config: dict | None = None  # type: ignore[type-arg]
    """A DeepSpeed configuration of your own (a JSON file, its address, or its content) instead of one in
    deepspeed_configs."""

    @field_validator("config", mode="before")
    @classmethod
    def _is_content(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(
                f"{value!r:.200}: names a file, which is read only for a recipe that you give to flytune or "
                "pyflyte yourself; write the content of the file here"
            )
        return value

    def refusals(self, recipe: Any) -> list[str]:
        if self.sequence_parallel == 1:
            return []
        training, objective = recipe.training, recipe.objective.name
        reasons = {
            f"objective {objective}: only sft divides its samples": objective != "sft",
            "data.images: an image's features are not divided": recipe.data.images,
            "training.neftune_noise_alpha: its noise would follow from the length of a part": (
                training.neftune_noise_alpha is not None
            ),
            "training.torch_compile: exchanges in compiled layers were not tried": training.torch_compile,
            "training.router_aux_loss_coef: routers would be balanced over a part of each sample; write 0": (
                training.router_aux_loss_coef
            ),
        }
        parts = f"sharding.sequence_parallel: {self.sequence_parallel}"
        return [f"{parts} with {reason}; or leave it out" for reason, holds in reasons.items() if holds]

    @property
    def is_auto(self) -> bool:
        """True if the plan chooses it."""
        return self.name == "auto"

    @model_validator(mode="after")
    def _auto_alone(self) -> Self:
        others = {
            "config": self.config,
            "offload": self.offload != "none",
            "replicas": self.replicas not in (1, "auto"),
            "sequence_parallel": self.sequence_parallel > 1,
        }
        for field, value in others.items():
            if self.is_auto and value:
                raise ValueError(
                    f"{field}: with auto the plan chooses the sharding, its offload and replicas; name the "
                    "sharding too"
                )
        return self

    @model_validator(mode="after")
    def _offload_of_config(self) -> Self:
        """Take `offload` from the configuration, where it says what is offloaded, and where to."""
        if self.config is None:
            return self
        zero = self.config.get("zero_optimization")
        sections = zero if isinstance(zero, dict) else {}
        parts = [sections.get(part) for part in ("offload_optimizer", "offload_param")]
        devices = [part.get("device") for part in parts if isinstance(part, dict)]
        offload: Literal["none", "cpu", "nvme"] = "cpu" if "cpu" in devices else "none"
        if "nvme" in devices:
            offload = "nvme"
        if "offload" in self.model_fields_set and self.offload != offload:
            raise ValueError(f"offload: {self.offload}, but config offloads to {offload}; leave offload out")
        return self if self.offload == offload else self.model_copy(update={"offload": offload})


HUB_ADDRESS = re.compile(r"hf://(?!(?:datasets|spaces|buckets)/)[\w-][\w.-]*/[\w.-]+")
"""Address of a model repository on the Hugging Face Hub."""


class TaskSection(Strict):
    """A task on base and tuned model; flytune/evaluation has a module for each kind."""

    module: ClassVar[str]
    """Name of that module. A further kind has a required field `kind`, by which a recipe says that it means
    this one."""
    name: Annotated[str, Field(min_length=1)]


class HarnessTask(TaskSection):
    """A task or group of lm-evaluation-harness."""

    module = "harness"
    num_fewshot: Annotated[int, Field(ge=0, le=limits.LISTED)] | None = None
    """Number of few-shot examples; by default the task's own."""
    limit: Positive | None = None
    """Largest number of documents of each task."""


EvaluationTask = HarnessTask
"""All kinds of tasks, a union where there are several."""


class Guard(Strict):
    """A benchmark score that training must not make worse."""

    task: str
    metric: str | None = None
    """Metric of the task; by default its first."""
    margin: Annotated[float, Field(ge=0, le=limits.FACTOR)] = 0.0
    """Allowed change for the worse, in the metric's unit."""


class Evaluation(Section):
    """The evaluation of the exported model, in a task of its own."""

    max_samples: Positive = 500
    """Largest number of held-out samples to score."""
    eval_steps: Positive | Fraction | Literal["epoch"] | None = None
    """Optimizer steps between evaluations of the live model on those samples; below 1, their share of all
    steps; `epoch` evaluates it at the end of each epoch; none by default."""
    early_stopping_patience: Positive | None = None
    """Number of evaluations in a row without a lower eval_loss after which training ends; no limit by
    default."""
    early_stopping_threshold: Annotated[float, Field(ge=0, le=limits.FACTOR)] = 0.0
    """Decrease of eval_loss, in the unit of the objective's loss, that an evaluation must exceed to count as
    a lower one."""
    batch_size: Annotated[int, Field(gt=0, le=limits.MICRO_BATCH)] = 8
    """Samples, prompts or requests of one forward pass."""
    sample_answers: Annotated[int, Field(ge=0, le=limits.LISTED)] = 16
    """Number of held-out prompts that base and tuned model answer side by side."""
    max_new_tokens: Annotated[int, Field(gt=0, le=limits.TOKENS)] = 128
    """Largest number of tokens of an answer."""
    tasks: list[EvaluationTask] = Field(default=[], max_length=limits.LISTED)
    """Tasks of lm-evaluation-harness, run on base and tuned model."""
    include_path: PathOrAddress | None = None
    """A folder of your own tasks in the harness's YAML (recipes/tasks), or its address."""
    apply_chat_template: bool = False
    """Put the tasks' prompts into the chat template."""
    task_shards: Annotated[int, Field(gt=0, le=limits.SHARDS)] = 1
    """Number of parts of each task's documents; each part is a pod."""
    shape: str | None = None
    """A row of shapes.yaml to evaluate on; by default the one of training."""
    must_not_fall: list[Guard] = Field(default=[], max_length=limits.LISTED)
    """Guards: if one is broken, the model is stored but not published or promoted."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        """Accept `gsm8k` for `{name: gsm8k}`."""
        if not isinstance(value, list):
            return value
        return [{"name": item} if isinstance(item, str) else item for item in value]

    @model_validator(mode="after")
    def _patience_has_scores(self) -> Self:
        if self.early_stopping_patience is not None and self.eval_steps is None:
            raise ValueError(
                "early_stopping_patience counts evaluations of the live model, and there are none: set "
                "eval_steps"
            )
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError("early_stopping_threshold has no effect alone; set early_stopping_patience too")
        return self

    @model_validator(mode="after")
    def _guards_have_tasks(self) -> Self:
        if self.must_not_fall and not self.tasks:
            raise ValueError("must_not_fall needs the scores of evaluation.tasks, which has no tasks")
        return self


class Hardware(Section):
    """Limits on machines, time and price; the planner chooses the shape."""

    shape: str = "auto"
    """A row of shapes.yaml, `this-machine`, or `auto`: on a cluster the cheapest run within max_hours and
    max_price, without one this machine."""
    accelerator: str | None = None
    """Accelerator of the shape: cpu, T4, A100-80GB ..."""
    max_price_per_hour: Annotated[float, Field(gt=0, le=limits.PRICE)] | None = None
    """Largest price of the shape, all nodes together, in the currency of shapes.yaml."""
    spot: bool | None = None
    """Only spot shapes (true) or only others (false); both by default."""
    max_hours: Annotated[float, Field(gt=0, le=limits.HOURS)] | None = None
    """Largest time of training, all attempts together; then the run saves, exports and evaluates the
    model."""
    max_price: Annotated[float, Field(gt=0, le=limits.PRICE)] | None = None
    """Largest price of training, in the currency of shapes.yaml; the run ends as with max_hours."""
    headroom: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of a GPU's memory (on a CPU, of a process's) that the plan must leave free; by default a tenth
    where it can."""


class Checkpoints(Section):
    """The checkpoints of a run, from which it resumes after a failure."""

    save_steps: Positive | Fraction | Literal["auto", "epoch"] | None = None
    """Optimizer steps between checkpoints; below 1, their share of all steps; `auto` takes the interval that
    loses least time, `epoch` saves at the end of each epoch; none are written by default."""
    save_total_limit: Positive = 2
    """Number of newest checkpoints to keep, in addition to the one of the lowest eval_loss with `export:
    best`."""
    export: Literal["last", "best"] = "last"
    """Weights that the run exports: those of the last step, or those of the checkpoint with the lowest
    eval_loss."""
    folder: PathOrAddress | None = None
    """A folder that every attempt and node can reach (mounted into the pods, absolute), or an fsspec address.
    By default: on a cluster below its raw output location, otherwise `.checkpoints`."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] | None = None
    """Name whose runs resume from each other's checkpoints; by default runs of equal recipes (without
    hardware) and data do."""

    @property
    def is_mounted(self) -> bool:
        """True if its path is not on the pod's own disk."""
        return self._is_address or (self.address.startswith("/") and not self.address.startswith("/tmp/"))

    @property
    def address(self) -> str:
        """Folder or address of the checkpoints; if the recipe and the cluster give none, a folder of this
        machine."""
        return self.folder or ".checkpoints"

    @property
    def _is_address(self) -> bool:
        return self.folder is None or "://" in self.folder

    @property
    def home(self) -> str:
        """Folder on a file system: `folder`, or one on the pod's own disk if that is an address."""
        return f"{tempfile.gettempdir()}/flytune-runs" if "://" in self.address else self.address

    @property
    def copies_on_disk(self) -> int:
        """Largest number of checkpoints on a pod's own disk: for an address, the one that waits to be stored,
        or is loaded."""
        if not self.save_steps:
            return 0
        if self.is_mounted:
            return 1 if self._is_address else 0
        return self.save_total_limit + (self.export == "best") + 1


class Tracking(Section):
    """Experiment trackers that receive each step, in addition to the artifact's steps.jsonl."""

    report_to: list[TrackerName] = Field(default=[])
    """Trackers to report to."""
    project: str = "flytune"
    """Project of Weights & Biases; experiment of MLflow."""


class Approval(Strict):
    """A person's approval, without which nothing is published or accepted."""

    hours: Annotated[float, Field(gt=0, le=limits.HOURS)]
    """Hours that the run waits for an answer; none is a no."""


class Publish(Section):
    """Publishing of the artifact outside of Flyte's own store."""

    address: PathOrAddress | None = None
    """A folder or fsspec address; the artifact is stored below it under the recipe's name and a hash of its
    content. Or hf://owner/name, a repository on the Hugging Face Hub, with a revision for each run."""
    private: bool = True
    """Visibility of a repository on the hub that is created by the run."""
    every_save: bool = False
    """Publish the weights of each checkpoint too, during training; only on the hub."""
    approval: Approval | None = None
    """Wait for a person after evaluation, before the artifact is published, or accepted by a refresh
    (docs/publish.md)."""

    def refusals(self, recipe: Any) -> list[str]:
        if not self.every_save or recipe.checkpoints.save_steps:
            return []
        return [
            "publish.every_save publishes the weights at each checkpoint, and none are written: set "
            "checkpoints.save_steps"
        ]

    @model_validator(mode="after")
    def _approved_first(self) -> Self:
        if self.approval is not None and self.every_save:
            raise ValueError(
                "every_save publishes weights that nobody has approved; leave out every_save, or approval"
            )
        return self

    @model_validator(mode="after")
    def _hub_address(self) -> Self:
        on_hub = (self.address or "").startswith("hf://")
        if on_hub and not HUB_ADDRESS.fullmatch(self.address or ""):
            raise ValueError(
                f"address: {self.address} is not a model repository of the hub; write hf://owner/name"
            )
        if self.every_save and not on_hub:
            raise ValueError("every_save publishes only to the hub; give address: hf://owner/name")
        return self


class Notify(Section):
    """Notifications of the end of a run."""

    on: list[Literal["succeeded", "failed"]] = Field(default=["failed"])
    """Outcomes that are reported."""
    email: list[str] = Field(default=[])
    """Addresses of mail that Flyte sends; only for launch plans (scheduled runs)."""
    slack: list[str] = Field(default=[])
    """Mail addresses of Slack channels; only for launch plans."""
    webhook: bool = False
    """Post to the address in the secret FLYTUNE_WEBHOOK (cluster.yaml), in Slack's format; for every run."""
