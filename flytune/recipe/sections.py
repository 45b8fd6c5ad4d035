"""The sections of a recipe, field by field.

Field names are those of transformers, TRL and PEFT; other fields state intent: the global batch, never accumulation steps.
A field that is added after 0.1.0 is marked with its version (Recipe.key).
"""

import re
import tempfile
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from flytune.recipe import json_files
from flytune.recipe.quantization import Quantization
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
    extra_special_tokens: list[Annotated[str, Field(min_length=1)]] = Field(default=[], json_schema_extra={"since": "0.2.0"})
    """Special tokens to add to the vocabulary, such as ChatML's marks; their rows of embedding and head are trained."""

    @model_validator(mode="after")
    def _tokens_once(self) -> Self:
        if len(set(self.extra_special_tokens)) < len(self.extra_special_tokens):
            raise ValueError("extra_special_tokens: a token is listed twice; list each once")
        return self


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
    eos_token: str | None = Field(default=None, json_schema_extra={"since": "0.2.0"})
    """One of the tokenizer's tokens that ends answers instead of its EOS, such as ChatML's <|im_end|>."""
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


_TABLES = ("embed_tokens", "lm_head")


class Method(Quantization):
    """The trained weights: all, an adapter, or an adapter on a quantized base."""

    name: Literal["full", "lora", "qlora"]
    r: Positive = 16
    """Rank of the adapter."""
    lora_alpha: Positive = 32
    """Scale of the adapter, which is multiplied by lora_alpha / r."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    target_modules: str | list[str] = "all-linear"
    """Layers with an adapter: `all-linear`, a regular expression, or a list of names."""
    use_dora: bool = Field(default=False, json_schema_extra={"since": "0.2.0"})
    """DoRA: the norm of each row of an adapted weight is trained apart from its direction."""
    use_rslora: bool = Field(default=False, json_schema_extra={"since": "0.2.0"})
    """rsLoRA: the adapter is multiplied by lora_alpha / sqrt(r) instead."""
    init_lora_weights: Literal[True] | Annotated[str, Field(pattern=r"^(gaussian|pissa|pissa_niter_[1-9]\d*)$")] = Field(
        default=True, json_schema_extra={"since": "0.2.0"}
    )
    """Initial values of the adapter: `gaussian`, or `pissa` (its base's largest singular values; pissa_niter_16 is faster)."""
    rank_pattern: dict[str, Positive] = Field(default={}, json_schema_extra={"since": "0.2.0"})
    """Ranks of layers that have another one than r, by name or regular expression: {down_proj: 32}."""
    alpha_pattern: dict[str, Positive] = Field(default={}, json_schema_extra={"since": "0.2.0"})
    """Scales of layers that have another one than lora_alpha, by name or regular expression."""
    modules_to_save: list[Literal["embed_tokens", "lm_head"]] = Field(default=[], json_schema_extra={"since": "0.2.0"})
    """Tables that are trained completely beside the adapter, and stored with it: input embedding, head."""
    trainable_token_indices: list[Annotated[int, Field(ge=0)]] = Field(default=[], json_schema_extra={"since": "0.2.0"})
    """Ids of further tokens whose rows of embedding and head are trained, as those of model.extra_special_tokens are."""
    adapter: str | None = None
    """An adapter to train further (folder or fsspec address of an artifact) instead of a new one; r and the rest must match."""

    @model_validator(mode="after")
    def _adapter_fields(self) -> Self:
        given = sorted(self.model_fields_set - {"name"})
        # A recipe that went through JSON (between tasks) carries every field; only changed ones are a decision.
        changed = [name for name in given if getattr(self, name) != type(self).model_fields[name].default]
        if self.name != "qlora" and (quantized := [name for name in changed if name in Quantization.model_fields]):
            raise ValueError(f"{', '.join(quantized)}: only for qlora, whose base is quantized; write name: qlora")
        if self.name == "full" and changed:
            raise ValueError(f"{', '.join(changed)}: only for lora and qlora; full trains all weights")
        if self.is_pissa and self.name == "qlora":
            raise ValueError(
                f"init_lora_weights: {self.init_lora_weights} takes singular values out of 16- or 32-bit weights, and those of "
                "qlora have 4 bits; use method lora, or leave it out"
            )
        for other in ("adapter", "use_dora"):
            if self.is_pissa and getattr(self, other):
                raise ValueError(f"init_lora_weights: {self.init_lora_weights} cannot be combined with {other}; choose one")
        if bad := [key for key in (*self.rank_pattern, *self.alpha_pattern) if not _is_pattern(key)]:
            raise ValueError(f"rank_pattern, alpha_pattern: {bad[0]!r} is no regular expression; write a layer's name")
        if both := sorted({*self.modules_to_save, *(_TABLES if self.trainable_token_indices else ())} & self._named_targets):
            raise ValueError(f"{both[0]}: has an adapter by target_modules, and is trained itself; name it in one of them")
        return self

    @property
    def is_pissa(self) -> bool:
        """True if the adapter starts from the base's singular values, which the frozen weights then lack."""
        return isinstance(self.init_lora_weights, str) and self.init_lora_weights.startswith("pissa")

    @property
    def largest_rank(self) -> int:
        """Largest rank of the exported adapter; PiSSA is exported as LoRA of twice the rank."""
        return max(self.r, *self.rank_pattern.values(), 1) * (2 if self.is_pissa else 1)

    @property
    def _named_targets(self) -> set[str]:
        """Names in target_modules, where it is a list."""
        return set() if isinstance(self.target_modules, str) else set(self.target_modules)


def _is_pattern(key: str) -> bool:
    try:
        re.compile(key)
    except re.error:
        return False
    return True


class Sharding(Strict):
    """The distribution of model and optimizer over processes."""

    name: Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp", "device_map"]
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Storage of sharded states that are not in use: the GPU (`none`), host memory, or the node's NVMe disk."""
    # Flyte's type for any JSON object.
    config: dict | None = Field(default=None, json_schema_extra={"since": "0.2.0"})  # type: ignore[type-arg]
    """A DeepSpeed configuration of your own (a JSON file, its address, or its content) instead of one in deepspeed_configs."""

    @field_validator("config", mode="before")
    @classmethod
    def _read_config(cls, value: Any) -> Any:
        return json_files.read(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _offload_of_config(self) -> Self:
        """Take `offload` from the configuration, where it says what is offloaded, and where to."""
        if self.config is None:
            return self
        zero = self.config.get("zero_optimization")
        parts = [zero.get(part) for part in ("offload_optimizer", "offload_param")] if isinstance(zero, dict) else []
        devices = [part.get("device") for part in parts if isinstance(part, dict)]
        offload: Literal["none", "cpu", "nvme"] = "nvme" if "nvme" in devices else "cpu" if "cpu" in devices else "none"
        if "offload" in self.model_fields_set and self.offload != offload:
            raise ValueError(f"offload: {self.offload}, but config offloads to {offload}; leave offload out")
        return self if self.offload == offload else self.model_copy(update={"offload": offload})


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
    eval_steps: Positive | Literal["epoch"] | None = None
    """Optimizer steps between evaluations of the live model on those samples; `epoch` evaluates it at the end of each epoch;
    none by default."""
    early_stopping_patience: Annotated[Positive | None, Field(json_schema_extra={"since": "0.2.0"})] = None
    """Number of evaluations in a row without a lower eval_loss after which training ends; no limit by default."""
    early_stopping_threshold: Annotated[float, Field(ge=0, json_schema_extra={"since": "0.2.0"})] = 0.0
    """Decrease of eval_loss, in nats, that an evaluation must exceed to count as a lower one."""
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
    def _patience_has_scores(self) -> Self:
        if self.early_stopping_patience is not None and self.eval_steps is None:
            raise ValueError("early_stopping_patience counts evaluations of the live model, and there are none: set eval_steps")
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError("early_stopping_threshold has no effect alone; set early_stopping_patience too")
        return self

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

    save_steps: Positive | Literal["auto", "epoch"] | None = None
    """Optimizer steps between checkpoints; `auto` takes the interval that loses least time, `epoch` saves at the end of each
    epoch; none are written by default."""
    save_total_limit: Positive = 2
    """Number of newest checkpoints to keep, in addition to the one of the lowest eval_loss with `export: best`."""
    export: Annotated[Literal["last", "best"], Field(json_schema_extra={"since": "0.2.0"})] = "last"
    """Weights that the run exports: those of the last step, or those of the checkpoint with the lowest eval_loss."""
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
        """Largest number of checkpoints on a pod's own disk: for an address, the one that waits to be stored, or is loaded."""
        kept = self.save_total_limit + (self.export == "best")
        copies = kept + 1 if not self.is_mounted else 1 if self._is_address else 0
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
