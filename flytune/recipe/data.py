"""The section `data` of a recipe."""

import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from flytune import limits
from flytune.recipe.sections import Fraction, Section
from flytune.schema import PathOrAddress


def _day(text: str) -> str:
    datetime.date.fromisoformat(text)
    return text


class Source(Section):
    """A source of rows: its address and its format."""

    path: PathOrAddress | None = None
    """A file, a folder, a pattern (data/*.jsonl), or an fsspec address (s3://, gs://) of them: JSON Lines,
    JSON, CSV, text, Parquet or Arrow."""
    dataset_name: PathOrAddress | None = None
    """A data set on the Hugging Face hub, instead of `path`."""
    dataset_config: str | None = None
    """Configuration (subset) of the data set on the hub."""
    dataset_split: str = "train"
    """Split of the data set on the hub."""
    revision: str | None = None
    """Commit, tag or branch of the data set on the hub."""
    format: Literal[
        "auto",
        "messages",
        "sharegpt",
        "prompt_completion",
        "instruction",
        "text",
        "tokens",
        "preference",
        "unpaired",
    ] = "auto"
    """Format of the rows: `auto` decides by the columns of the first row; `tokens` are input_ids, with or
    without labels; `preference` are chosen and rejected answers, `unpaired` answers with a label
    (docs/objectives.md)."""
    columns: dict[str, str] = Field(default={})
    """Names of the data's columns where they differ from the format's: {instruction: question, output:
    answer}."""
    remove_columns: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=limits.LISTED)
    """Columns that are left out on purpose: columns that other tools read, and that would be refused here
    (docs/data.md)."""
    input_separator: str = "\n\n"
    """Text between the columns instruction and input of one question. LLaMA-Factory's is one line break."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """Sample of a text file (.txt): a line, a paragraph (up to an empty line), or the whole file."""
    exclude: list[str] = Field(default=[], max_length=limits.LISTED)
    """Files and folders below `path` that are not read: names or patterns, [test, "*.old.jsonl"]."""
    max_samples: Annotated[int, Field(gt=0, le=limits.ROWS)] | None = None
    """Number of rows to read; all by default."""

    @property
    def name(self) -> str:
        """Name in messages and records."""
        return str(self.dataset_name or self.path)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.dataset_name is None):
            raise ValueError(
                "give exactly one of path (file, folder or address) and dataset_name (on the hub)"
            )
        self._check_files()
        return self

    def _check_files(self) -> None:
        changed = self.changed("exclude", "sample_by")
        if self.dataset_name is not None and changed:
            raise ValueError(
                f"{', '.join(changed)}: no effect on dataset_name, which has no files of yours; for path "
                "alone"
            )


OF_HELDOUT = ("format", "columns", "remove_columns", "input_separator", "sample_by", "dataset_split")
"""Fields beside `sources` that are those of data.heldout_path."""


class WeightedSource(Source):
    """One of several sources, with a weight."""

    weight: Annotated[float, Field(ge=limits.LEAST_FACTOR, le=1000)] = 1.0
    """Share of its rows to use, chosen by content; with 2.5, all rows are used twice and half of them once
    more."""


class Data(Source):
    """The training data: sources, rendering, truncation and split."""

    sources: list[WeightedSource] = Field(default=[], max_length=limits.LISTED)
    """Several sources with weights, instead of path and dataset_name."""
    system_prompt: str | None = None
    """System message for chats that have none."""
    chat_template: PathOrAddress | None = None
    """A Jinja file (or its address), or one that is shipped, by its name (alpaca, chatml, chatml_tools,
    llama3), if the tokenizer has no chat template or another one is wanted."""
    pad_token: str | None = None
    """One of the tokenizer's tokens, if it has no pad token."""
    eos_token: str | None = None
    """One of the tokenizer's tokens that ends answers instead of its EOS, such as ChatML's <|im_end|>."""
    completion_only_loss: bool = True
    """Train only on the answers (completion, output, assistant turns); otherwise on every token."""
    train_on: Literal["answers", "answers and thoughts"] = "answers and thoughts"
    """Trained part of answers with thoughts (reasoning_content, thinking, <think>): with `answers` thoughts
    are context."""
    template_date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$"), AfterValidator(_day)] | None = None
    """Day (2026-01-31) that a chat template writes which asks for today's; without one, samples differ from
    day to day."""
    max_length: Annotated[int, Field(gt=0, le=limits.TOKENS)] = 1024
    """Largest number of tokens of a sample."""
    too_long: Literal["truncate", "split", "drop", "error"] = "truncate"
    """Treatment of longer samples (docs/data.md); they are counted and reported in any case."""
    images: bool = False
    """Images in chats (docs/images.md): parts of type image, or columns image and images; for vision-language
    models."""
    max_pixels: Annotated[int, Field(gt=0, le=limits.PIXELS)] | None = None
    """Largest number of pixels of an image; larger ones are reduced to it."""
    packing: bool = False
    """Pack complete samples into blocks of max_length tokens; attention does not cross samples."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of samples held out for evaluation; chosen by content, so that equal samples are in the same
    split. With 0 nothing is measured on samples (docs/data.md, "Held-out data")."""
    heldout_path: PathOrAddress | None = None
    """A separate file or folder for evaluation, instead of `heldout_fraction`; it has the same format and
    columns."""
    eval_split: str | None = None
    """A split of `dataset_name` for evaluation, instead of `heldout_fraction`; it has the same format and
    columns."""
    add_bos_token: bool | None = None
    """BOS before raw text (text, prompt_completion); by default what the tokenizer adds. Chat templates write
    their own."""
    add_eos_token: bool = True
    """A trained EOS after raw text (text, prompt_completion)."""
    split_special_tokens: bool | None = None
    """Special tokens in a row's own text (`<|im_end|>`): text (true), control tokens (false); unset: text in
    1 % of rows."""
    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of rows that may be bad: they are skipped and listed in bad_rows.jsonl. With 0 the first one is
    an error."""
    deduplicate: bool = False
    """Remove samples that equal an earlier one, and held-out ones that equal a training sample; takes 80
    bytes per sample."""
    seed: Annotated[int, Field(ge=-limits.SEED, le=limits.SEED)] = 42
    """Seed of the split, and of the rows that weights below 1 select."""
    contract: Literal["stop", "warn"] = "stop"
    """Effect of a failed check of the data contract (docs/xray.md): `stop` ends preparation, `warn` only
    reports it."""
    min_trained_fraction: Fraction | None = None
    """Smallest share of all tokens that must be trained."""
    max_truncated_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Largest share of all samples, and of all tokens, that may be cut at max_length."""
    max_dropped_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Largest share of all samples, and of all tokens, that may be dropped."""

    @property
    def all_sources(self) -> dict[str, WeightedSource]:
        """All sources by their keys in the recipe: `data`, or `data.sources[0]`, `data.sources[1]` ..."""
        if self.sources:
            return {f"data.sources[{index}]": source for index, source in enumerate(self.sources)}
        return {"data": WeightedSource(**{name: getattr(self, name) for name in Source.model_fields})}

    @property
    def heldout_key(self) -> str | None:
        """The recipe's key of held-out data of its own; None if it is split from the training data."""
        if self.heldout_path:
            return "data.heldout_path"
        return "data.eval_split" if self.eval_split else None

    @property
    def all_read(self) -> dict[str, Source]:
        """All sources, and held-out data of its own, by their keys in the recipe."""
        heldout: dict[str, Source] = {self.heldout_key: self} if self.heldout_key else {}
        return {**self.all_sources, **heldout}

    @property
    def holds_out(self) -> bool:
        """True if some samples are held out."""
        return self.heldout_fraction > 0 or self.heldout_key is not None

    @property
    def heldout_name(self) -> str:
        """The name of held-out data of its own, in messages and records."""
        return self.heldout_path or f"{self.dataset_name}[{self.eval_split}]"

    def refusals(self, recipe: Any) -> list[str]:
        return [
            f"{key}.{name}: only data sets on the hub have one; remove it, or name one in dataset_name"
            for key, source in self.all_sources.items()
            if source.path is not None
            for name in source.changed("dataset_config", "revision")
        ]

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if sum((self.path is not None, self.dataset_name is not None, bool(self.sources))) != 1:
            raise ValueError(
                "give exactly one of path (file, folder or address), dataset_name (on the hub) and sources "
                "(a list of them)"
            )
        self._check_files()
        if self.eval_split is not None:
            self._check_eval_split()
        self._check_images()
        if self.train_on == "answers" and not self.completion_only_loss:
            raise ValueError(
                "completion_only_loss: false trains every token, also thoughts, and train_on: answers leaves "
                "them out"
            )
        kept = OF_HELDOUT if self.heldout_path else ()
        changed = self.changed(*(name for name in Source.model_fields if name not in kept))
        if self.deduplicate and any(source.weight > 1 for source in self.sources):
            raise ValueError("deduplicate removes the samples that a weight above 1 repeats; use one of them")
        if self.sources and changed:
            raise ValueError(f"{', '.join(changed)}: no effect beside sources; write it into each of them")
        return self

    def _check_images(self) -> None:
        named = [source.columns for source in self.all_sources.values() if "images" in source.columns]
        if not self.images and (named or self.max_pixels is not None):
            raise ValueError(f"{'columns: images' if named else 'max_pixels'}: only for data.images: true")
        if self.images and self.packing:
            raise ValueError("packing: samples with images are not packed; remove it")
        if self.images and self.too_long == "split":
            raise ValueError("too_long: split: a sample with images is not split; use drop or error")

    def _check_eval_split(self) -> None:
        if self.dataset_name is None:
            raise ValueError(
                "eval_split names a split of dataset_name; for files and several sources use heldout_path"
            )
        if self.heldout_path is not None or self.changed("heldout_fraction"):
            other = "heldout_fraction" if self.heldout_path is None else "heldout_path"
            raise ValueError(f"eval_split and {other} both name the held-out data; remove one of them")
        if self.eval_split in ("", self.dataset_split):
            raise ValueError(
                f"eval_split {self.eval_split!r} must be another split than dataset_split, which is trained "
                "on"
            )
