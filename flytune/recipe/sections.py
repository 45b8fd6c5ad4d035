"""The sections of a recipe, field by field.

Field names are those of transformers, TRL and PEFT; other fields state intent: the global batch, never accumulation steps.
A field that is added after 0.1.0 is marked with its version (Recipe.key).
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
    """Type of the loaded and exported weights."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Implementation of attention in transformers."""
    trust_remote_code: bool = False
    """Permission to run Python code of the model's repository."""


class Source(Strict):
    """A source of rows: its address and its format."""

    path: str | None = None
    """A file, a folder, or an fsspec address (s3://, gs://) of JSON Lines, JSON, CSV, Parquet or Arrow."""
    dataset_name: str | None = None
    """A data set on the Hugging Face hub, instead of `path`."""
    dataset_config: str | None = None
    """Configuration (subset) of the data set on the hub."""
    dataset_split: str = "train"
    """Split of the data set on the hub."""
    revision: str | None = None
    """Commit, tag or branch of the data set on the hub."""
    format: Literal["auto", "messages", "sharegpt", "prompt_completion", "instruction", "text", "tokens"] = "auto"
    """Format of the rows: `auto` decides by the columns of the first row; `tokens` are input_ids, with or without labels."""
    columns: dict[str, str] = Field(default={})
    """Names of the data's columns where they differ from the format's: {instruction: question, output: answer}."""
    max_samples: Positive | None = None
    """Number of rows to read; all by default."""

    @property
    def name(self) -> str:
        """Name in messages and records."""
        return str(self.dataset_name or self.path)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.dataset_name is None):
            raise ValueError("give exactly one of path (file, folder or address) and dataset_name (on the hub)")
        return self


class WeightedSource(Source):
    """One of several sources, with a weight."""

    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Share of its rows to use, chosen by content; with 2.5, all rows are used twice and half of them once more."""


class Data(Source):
    """The training data: sources, rendering, truncation and split."""

    sources: list[WeightedSource] = Field(default=[])
    """Several sources with weights, instead of path and dataset_name."""
    system_prompt: str | None = None
    """System message for chats that have none."""
    chat_template: str | None = None
    """A Jinja file (or its address), if the tokenizer has no chat template or another one is wanted."""
    pad_token: str | None = None
    """One of the tokenizer's tokens, if it has no pad token."""
    completion_only_loss: bool = True
    """Train only on the answers (completion, output, assistant turns); otherwise on every token."""
    max_length: Annotated[int, Field(gt=0, le=2**24)] = 1024
    """Largest number of tokens of a sample."""
    too_long: Literal["truncate", "split", "drop", "error"] = "truncate"
    """Treatment of longer samples (docs/data.md); they are counted and reported in any case."""
    packing: bool = False
    """Pack complete samples into blocks of max_length tokens; attention does not cross samples."""
    heldout_fraction: Fraction = 0.02
    """Share of samples held out for evaluation; chosen by content, so that equal samples are in the same split."""
    heldout_path: str | None = None
    """A separate file or folder for evaluation, instead of `heldout_fraction`; it has the same format and columns."""
    eval_split: str | None = Field(default=None, json_schema_extra={"since": "0.2.0"})
    """A split of `dataset_name` for evaluation, instead of `heldout_fraction`; it has the same format and columns."""
    add_bos_token: bool | None = Field(default=None, json_schema_extra={"since": "0.2.0"})
    """BOS before raw text (text, prompt_completion); by default what the tokenizer adds. Chat templates write their own."""
    add_eos_token: bool = Field(default=True, json_schema_extra={"since": "0.2.0"})
    """A trained EOS after raw text (text, prompt_completion)."""
    split_special_tokens: bool | None = Field(default=None, json_schema_extra={"since": "0.2.0"})
    """Special tokens in a row's own text (`<|im_end|>`): text (true), control tokens (false); unset: text in 1 % of rows."""
    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of rows that may be bad: they are skipped and listed in bad_rows.jsonl. With 0 the first one is an error."""
    deduplicate: bool = False
    """Remove samples that equal an earlier one, and held-out ones that equal a training sample; takes 80 bytes per sample."""
    seed: int = 42
    """Seed of the split, and of the rows that weights below 1 select."""
    contract: Literal["stop", "warn"] = "stop"
    """Effect of a failed check of the data contract (docs/xray.md): `stop` ends preparation, `warn` only reports it."""
    min_trained_fraction: Fraction | None = None
    """Smallest share of all tokens that must be trained."""
    max_truncated_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Largest share of all samples that may be cut at max_length."""
    max_dropped_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Largest share of all samples that may be dropped."""

    @property
    def all_sources(self) -> dict[str, WeightedSource]:
        """All sources by their keys in the recipe: `data`, or `data.sources[0]`, `data.sources[1]` ..."""
        if self.sources:
            return {f"data.sources[{index}]": source for index, source in enumerate(self.sources)}
        return {"data": WeightedSource(**{name: getattr(self, name) for name in Source.model_fields})}

    @property
    def heldout_key(self) -> str | None:
        """The recipe's key of held-out data of its own; None if it is split from the training data."""
        return "data.heldout_path" if self.heldout_path else "data.eval_split" if self.eval_split else None

    @property
    def heldout_name(self) -> str:
        """The name of held-out data of its own, in messages and records."""
        return self.heldout_path or f"{self.dataset_name}[{self.eval_split}]"

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if sum((self.path is not None, self.dataset_name is not None, bool(self.sources))) != 1:
            raise ValueError(
                "give exactly one of path (file, folder or address), dataset_name (on the hub) and sources (a list of them)"
            )
        if self.eval_split is not None:
            self._check_eval_split()
        of_heldout = {"format", "columns", "dataset_split"} if self.heldout_path else set()
        fields = [name for name in Source.model_fields if name not in of_heldout]
        changed = [name for name in fields if getattr(self, name) != Source.model_fields[name].default]
        if self.deduplicate and any(source.weight > 1 for source in self.sources):
            raise ValueError("deduplicate removes the samples that a weight above 1 repeats; use one of them")
        if self.sources and changed:
            raise ValueError(f"{', '.join(changed)}: no effect beside sources; write it into each of them")
        return self

    def _check_eval_split(self) -> None:
        if self.dataset_name is None:
            raise ValueError("eval_split names a split of dataset_name; for files and several sources use heldout_path")
        if self.heldout_path is not None or self.heldout_fraction != type(self).model_fields["heldout_fraction"].default:
            other = "heldout_fraction" if self.heldout_path is None else "heldout_path"
            raise ValueError(f"eval_split and {other} both name the held-out data; remove one of them")
        if self.eval_split in ("", self.dataset_split):
            raise ValueError(f"eval_split {self.eval_split!r} must be another split than dataset_split, which is trained on")


class Method(Strict):
    """The trained weights: all, an adapter, or an adapter on a 4-bit base."""

    name: Literal["full", "lora", "qlora"]
    r: Positive = 16
    """Rank of the adapter."""
    lora_alpha: Positive = 32
    """Scale of the adapter, which is multiplied by lora_alpha / r."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    target_modules: str | list[str] = "all-linear"
    """Layers with an adapter: `all-linear`, a regular expression, or a list of names."""
    adapter: str | None = None
    """An adapter to train further (folder or fsspec address of an artifact) instead of a new one; r and the rest must match."""

    @model_validator(mode="after")
    def _adapter_fields(self) -> Self:
        given = sorted(self.model_fields_set - {"name"})
        # A recipe that went through JSON (between tasks) carries every field; only changed ones are a decision.
        changed = [name for name in given if getattr(self, name) != type(self).model_fields[name].default]
        if self.name == "full" and changed:
            raise ValueError(f"{', '.join(changed)}: only for lora and qlora; full trains all weights")
        return self


class Sharding(Strict):
    """The distribution of model and optimizer over processes."""

    name: Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp", "device_map"]
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Storage of sharded states that are not in use: the GPU (`none`), host memory, or the node's NVMe disk."""


class Training(Strict):
    """The optimizer, its schedule, and the supervision of training."""

    learning_rate: Annotated[float, Field(gt=0)]
    global_batch_size: Positive
    """Samples (with data.packing: blocks) of one optimizer step over all processes; accumulation follows from it."""
    per_device_train_batch_size: Positive | None = None
    """Largest number of samples of one forward pass; by default the largest that fits."""
    auto_find_batch_size: bool = False
    """Halve that number in the next attempt after a GPU ran out of memory, with the same global batch."""
    num_train_epochs: Annotated[float, Field(gt=0)] = 1.0
    max_steps: Positive | None = None
    """Number of optimizer steps, instead of num_train_epochs."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "cosine"
    warmup_steps: Annotated[float, Field(ge=0)] = 0.03
    """Number of warm-up steps; below 1, their share of all steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    optim: Literal["auto", "adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit"] = "auto"
    """Optimizer; `auto` is paged_adamw_8bit for qlora, adamw_torch_fused otherwise."""
    activation_checkpointing: bool = True
    """Recompute activations in the backward pass instead of storing them."""
    torch_compile: bool = False
    """Compile each decoder layer: the first steps take minutes longer, the others are faster."""
    probe_longest: bool = False
    """Train the longest samples in the first step, which then shows if the memory suffices; warm-up reduces their weight."""
    logging_steps: Positive = 1
    """Optimizer steps between two logged steps."""
    hang_minutes: Annotated[float, Field(gt=0)] = 10.0
    """Minutes after which a step that is also ten times slower than any before ends the attempt, with a stack of each rank."""
    max_loss_jump: Annotated[float, Field(gt=1)] | None = None
    """Factor over the median of the last 16 logged losses from which a loss is treated like NaN."""
    on_bad_loss: Literal["stop", "skip"] = "stop"
    """Reaction to a bad loss; with `skip` the next attempt resumes from the last checkpoint and skips the data since, at most
    three times."""
    seed: int = 42
    """Seed of the order of samples, new adapters and dropout."""

    @model_validator(mode="after")
    def _skip_needs_each_step(self) -> Self:
        if self.on_bad_loss == "skip" and self.logging_steps > 1:
            raise ValueError("on_bad_loss: skip needs the loss of each step; set logging_steps to 1")
        return self


HUB_ADDRESS = re.compile(r"hf://(?!(?:datasets|spaces|buckets)/)[\w-][\w.-]*/[\w.-]+")
"""Address of a model repository on the Hugging Face Hub."""


class HarnessTask(Strict):
    """A task or group of lm-evaluation-harness."""

    name: Annotated[str, Field(min_length=1)]
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Number of few-shot examples; by default the task's own."""
    limit: Positive | None = None
    """Largest number of documents of each task."""


class Guard(Strict):
    """A benchmark score that training must not make worse."""

    task: str
    metric: str | None = None
    """Metric of the task; by default its first."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """Allowed change for the worse, in the metric's unit."""


class Evaluation(Strict):
    """The evaluation of the exported model, in a task of its own."""

    max_samples: Positive = 500
    """Largest number of held-out samples to score."""
    eval_steps: Positive | None = None
    """Optimizer steps between evaluations of the live model on those samples; none by default."""
    batch_size: Positive = 8
    """Samples, prompts or requests of one forward pass."""
    sample_answers: Annotated[int, Field(ge=0)] = 16
    """Number of held-out prompts that base and tuned model answer side by side."""
    max_new_tokens: Positive = 128
    """Largest number of tokens of an answer."""
    tasks: list[HarnessTask] = Field(default=[])
    """Tasks of lm-evaluation-harness, run on base and tuned model."""
    include_path: str | None = None
    """A folder of your own tasks in the harness's YAML (recipes/tasks), or its address."""
    apply_chat_template: bool = False
    """Put the tasks' prompts into the chat template."""
    task_shards: Positive = 1
    """Number of parts of each task's documents; each part is a pod."""
    shape: str | None = None
    """A row of shapes.yaml to evaluate on; by default the one of training."""
    must_not_fall: list[Guard] = Field(default=[])
    """Guards: if one is broken, the model is stored but not published or promoted."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        """Accept `gsm8k` for `{name: gsm8k}`."""
        return [{"name": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value

    @model_validator(mode="after")
    def _guards_have_tasks(self) -> Self:
        if self.must_not_fall and not self.tasks:
            raise ValueError("must_not_fall needs the scores of evaluation.tasks, which has no tasks")
        return self


class Hardware(Strict):
    """Limits on machines, time and price; the planner chooses the shape."""

    shape: str = "auto"
    """A row of shapes.yaml, or `auto`: the cheapest that fits."""
    accelerator: str | None = None
    """Accelerator of the shape: cpu, T4, A100-80GB ..."""
    max_price_per_hour: Annotated[float, Field(gt=0)] | None = None
    """Largest price of the shape, all nodes together, in the currency of shapes.yaml."""
    spot: bool | None = None
    """Only spot shapes (true) or only others (false); both by default."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Largest time of training, all attempts together; then the run saves, exports and evaluates the model."""
    max_price: Annotated[float, Field(gt=0)] | None = None
    """Largest price of training, in the currency of shapes.yaml; the run ends as with max_hours."""


class Checkpoints(Strict):
    """The checkpoints of a run, from which it resumes after a failure."""

    save_steps: Positive | Literal["auto"] | None = None
    """Optimizer steps between checkpoints; `auto` takes the interval that loses least time; none are written by default."""
    save_total_limit: Positive = 2
    """Number of newest checkpoints to keep, in addition to the one of the lowest eval_loss if evaluation.eval_steps is set."""
    folder: str | None = None
    """A folder that every attempt and node can reach (mounted into the pods, absolute), or an fsspec address. By default: on a
    cluster below its raw output location, otherwise `.checkpoints`."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] | None = None
    """Name whose runs resume from each other's checkpoints; by default runs of equal recipes (without hardware) and data do."""

    @property
    def is_mounted(self) -> bool:
        """True if its path is not on the pod's own disk."""
        return self._is_address or (self.address.startswith("/") and not self.address.startswith("/tmp/"))

    @property
    def address(self) -> str:
        """Folder or address of the checkpoints; if the recipe and the cluster give none, a folder of this machine."""
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
        """Largest number of checkpoints on a pod's own disk: for an address, the one that waits to be stored."""
        copies = self.save_total_limit + 1 if not self.is_mounted else 1 if self._is_address else 0
        return copies if self.save_steps else 0


class Tracking(Strict):
    """Experiment trackers that receive each step, in addition to the artifact's steps.jsonl."""

    report_to: list[Literal["wandb", "mlflow", "tensorboard"]] = Field(default=[])
    """Trackers to report to."""
    project: str = "flytune"
    """Project of Weights & Biases; experiment of MLflow."""


class Publish(Strict):
    """Publishing of the artifact outside of Flyte's own store."""

    address: str | None = None
    """A folder or fsspec address; the artifact is stored below it under the recipe's name and a hash of its content. Or
    hf://owner/name, a repository on the Hugging Face Hub, with a revision for each run."""
    private: bool = True
    """Visibility of a repository on the hub that is created by the run."""
    every_save: bool = False
    """Publish the weights of each checkpoint too, during training; only on the hub."""

    @model_validator(mode="after")
    def _hub_address(self) -> Self:
        on_hub = (self.address or "").startswith("hf://")
        if on_hub and not HUB_ADDRESS.fullmatch(self.address or ""):
            raise ValueError(f"address: {self.address} is no model repository of the hub; write hf://owner/name")
        if self.every_save and not on_hub:
            raise ValueError("every_save publishes only to the hub; give address: hf://owner/name")
        return self


class Notify(Strict):
    """Notifications of the end of a run."""

    on: list[Literal["succeeded", "failed"]] = Field(default=["failed"])
    """Outcomes that are reported."""
    email: list[str] = Field(default=[])
    """Addresses of mail that Flyte sends; only for launch plans (scheduled runs)."""
    slack: list[str] = Field(default=[])
    """Mail addresses of Slack channels; only for launch plans."""
    webhook: bool = False
    """Post to the address in the secret FLYTUNE_WEBHOOK (cluster.yaml), in Slack's format; for every run."""
