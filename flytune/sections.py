"""The sections of a recipe, field by field.

Field names are upstream's (transformers, TRL, PEFT); what is not upstream's is intent: the global batch, never
accumulation steps.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flytune.strict import Strict

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
