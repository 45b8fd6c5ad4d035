"""The sections of a recipe, field by field.

Field names are upstream's (transformers, TRL, PEFT); what is not upstream's is intent: the global batch, never
accumulation steps.
"""

import re
import tempfile
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from flytune.schema import Strict

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class Model(Strict):
    """The base model."""

    name_or_path: Annotated[str, Field(min_length=1)]
    """A Hugging Face id, or a folder with config.json, safetensors and tokenizer files."""
    revision: str | None = None
    """Commit, tag or branch on the hub; a commit is the only one that never changes. Not for folders."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """The type that weights are loaded and exported in."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    trust_remote_code: bool = False


class Source(Strict):
    """Where rows lie, and what they mean."""

    path: str | None = None
    """A file, a folder, or an fsspec address (s3://, gs://) of JSON Lines, JSON, CSV or Parquet."""
    dataset_name: str | None = None
    """A data set on the Hugging Face hub, instead of `path`."""
    dataset_config: str | None = None
    dataset_split: str = "train"
    revision: str | None = None
    format: Literal["auto", "messages", "sharegpt", "prompt_completion", "instruction", "text", "tokens"] = "auto"
    """`auto` looks at the columns of the first row; tokens are input_ids, with or without labels."""
    columns: dict[str, str] = Field(default={})
    """Where the data names its columns otherwise: {instruction: question, output: answer}."""
    max_samples: Positive | None = None
    """Read only so many rows; all when not set."""

    @property
    def name(self) -> str:
        """For messages and records."""
        return str(self.dataset_name or self.path)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.dataset_name is None):
            raise ValueError("give exactly one of path (file, folder or address) and dataset_name (on the hub)")
        return self


class WeightedSource(Source):
    """One of several sources."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Of its rows, the share that is drawn, chosen by content; 2.5 are all rows twice, and half of them once more."""


class Data(Source):
    """What to train on, and how it is rendered, cut and split."""

    sources: list[WeightedSource] = Field(default=[])
    """Several sources with weights, instead of path and dataset_name."""
    system_prompt: str | None = None
    """Put before chats that have no system message."""
    chat_template: str | None = None
    """A Jinja file (or its address), where the tokenizer has no chat template or not the wanted one."""
    pad_token: str | None = None
    """One of the tokenizer's own tokens, where it names no pad token."""
    completion_only_loss: bool = True
    """Train on the answers alone (completion, output, assistant turns); otherwise on every token."""
    max_length: Positive = 1024
    """Tokens of a sample at most."""
    too_long: Literal["truncate", "split", "drop", "error"] = "truncate"
    """What happens to a longer sample (docs/data.md); it is counted and reported in any case."""
    packing: bool = False
    """Fill blocks of max_length tokens with whole samples, each of which sees only itself."""
    heldout_fraction: Fraction = 0.02
    """The share of samples kept for evaluation; chosen by content, so that equal samples stay together."""
    heldout_path: str | None = None
    """A file or folder of its own for evaluation, instead of `heldout_fraction`; format and columns are those given here."""
    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of rows that may be bad: they are left out, and listed in bad_rows.jsonl. 0 stops at the first."""
    deduplicate: bool = False
    """Leave out samples that equal an earlier one, held-out ones that equal a training sample included; 80 bytes a sample."""
    seed: int = 42
    """Of the split, and of the rows that weights below 1 draw."""
    contract: Literal["stop", "warn"] = "stop"
    """What a broken line of the contract does (docs/xray.md): stop preparing, or only be told."""
    min_trained_fraction: Fraction | None = None
    """Of all tokens, the share that must be trained."""
    max_truncated_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Of all samples, the share that may be cut at max_length."""
    max_dropped_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Of all samples, the share that may be dropped."""

    @property
    def all_sources(self) -> dict[str, WeightedSource]:
        """What is read, by its key in the recipe: `data`, or `data.sources[0]`, `data.sources[1]` ..."""
        if self.sources:
            return {f"data.sources[{index}]": source for index, source in enumerate(self.sources)}
        return {"data": WeightedSource(**{name: getattr(self, name) for name in Source.model_fields})}

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if sum((self.path is not None, self.dataset_name is not None, bool(self.sources))) != 1:
            raise ValueError(
                "give exactly one of path (file, folder or address), dataset_name (on the hub) and sources (a list of them)"
            )
        of_heldout = {"format", "columns", "dataset_split"} if self.heldout_path else set()
        fields = [name for name in Source.model_fields if name not in of_heldout]
        changed = [name for name in fields if getattr(self, name) != Source.model_fields[name].default]
        if self.deduplicate and any(source.weight > 1 for source in self.sources):
            raise ValueError("deduplicate leaves out what a weight above 1 repeats; use one of them")
        if self.sources and changed:
            raise ValueError(f"{', '.join(changed)}: beside sources this says nothing; write it into each of them")
        return self


class Method(Strict):
    """What is trained: all weights, an adapter, or an adapter on a 4-bit base."""

    name: Literal["full", "lora", "qlora"]
    r: Positive = 16
    lora_alpha: Positive = 32
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    target_modules: str | list[str] = "all-linear"
    adapter: str | None = None
    """An adapter to go on from (folder or fsspec address of an artifact), instead of a new one; equal in r and the rest."""

    @model_validator(mode="after")
    def _adapter_fields(self) -> Self:
        given = sorted(self.model_fields_set - {"name"})
        # A recipe that went through JSON (between tasks) carries every field; only changed ones are a decision.
        changed = [name for name in given if getattr(self, name) != type(self).model_fields[name].default]
        if self.name == "full" and changed:
            raise ValueError(f"{', '.join(changed)}: only for lora and qlora; full trains all weights")
        return self


class Sharding(Strict):
    """How model and optimizer are laid over processes."""

    name: Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp", "device_map"]
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where what is sharded waits while it is not used: on its GPU, in host memory, on the node's NVMe disk."""


class Training(Strict):
    """The optimization."""

    learning_rate: Annotated[float, Field(gt=0)]
    global_batch_size: Positive
    """Samples (with data.packing: blocks) of one optimizer step, over all processes; accumulation follows from it."""
    per_device_train_batch_size: Positive | None = None
    """Samples of one forward pass at most; the largest number that fits when not set."""
    auto_find_batch_size: bool = False
    """When a GPU's memory is full, go on in the next attempt with half of that, and the same global batch."""
    num_train_epochs: Annotated[float, Field(gt=0)] = 1.0
    max_steps: Positive | None = None
    """Optimizer steps at most, instead of num_train_epochs."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "cosine"
    warmup_steps: Annotated[float, Field(ge=0)] = 0.03
    """Steps; below 1, a share of all steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    optim: Literal["auto", "adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit"] = "auto"
    """`auto`: paged_adamw_8bit for qlora, adamw_torch_fused otherwise."""
    activation_checkpointing: bool = True
    torch_compile: bool = False
    """Compile each decoder layer; the first steps take minutes longer, the others less."""
    probe_longest: bool = False
    """Train the longest samples in the first step, which then shows whether memory lasts; warm-up makes them count less."""
    logging_steps: Positive = 1
    hang_minutes: Annotated[float, Field(gt=0)] = 10.0
    """A step that takes longer, and longer than ten times the slowest before, ends the attempt with a stack of each rank."""
    max_loss_jump: Annotated[float, Field(gt=1)] | None = None
    """A logged loss so many times the median of the 16 before is as bad as one that is no number."""
    on_bad_loss: Literal["stop", "skip"] = "stop"
    """skip: the next attempt goes back to the last checkpoint and leaves out the data since, three times at most."""
    seed: int = 42

    @model_validator(mode="after")
    def _sees_each_step(self) -> Self:
        if self.on_bad_loss == "skip" and self.logging_steps > 1:
            raise ValueError("on_bad_loss: skip looks at each step; logging_steps must be 1")
        return self


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
        """`folder`; if neither it nor tasks.runtime.directories.with_checkpoint_folder has set one, a local one."""
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
