"""The fields and refusals that several sections `objective` of a recipe have."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from flytune import limits
from flytune.recipe.data import Data
from flytune.recipe.sections import Model, Section
from flytune.recipe.training import Training
from flytune.row_names import ANSWERS, RowKindName

Weight = Annotated[float, Field(ge=limits.LEAST_FACTOR, le=limits.FACTOR)]


class ObjectiveSection(Section):
    """The goal of training: the loss, and the kind of rows that it needs. `name` is the first field of each
    section."""

    row_kind: ClassVar[RowKindName] = ANSWERS
    """Kind of rows that it trains on (flytune.data.rows)."""
    head: ClassVar[str] = "language_model"
    """Head of the model that it trains (flytune.models.heads)."""
    reads_images: ClassVar[bool] = False
    """True if its rows may have images."""
    refused_formats: ClassVar[dict[str, str]] = {}
    """Formats of data that it cannot train, with the reason and what to do."""
    formats: ClassVar[tuple[str, ...] | None] = None
    """Formats of data that it can train, beside auto; None where it refuses some alone."""
    reads: ClassVar[str] = ""
    """Use of rows of these formats, as a verb and its object."""
    refused: ClassVar[dict[str, str]] = {}
    """Fields of other sections that it refuses unless they have their defaults (`data.packing`), or with one
    value (`data.too_long: split`), with the reason and what to do; {name} is the objective's."""
    # Full models are published with 1e-6 to 1e-4, small ones with up to 1e-3; adapters with about ten times
    # as much (Biderman et al. 2024, "LoRA Learns Less and Forgets Less").
    usual_learning_rates: ClassVar[tuple[float, float]] = (1e-4, 1e-3)
    """Largest usual learning rates of AdamW, of full models and of adapters."""

    always_in_key: ClassVar[tuple[str, ...]] = ()
    """Fields that are part of a recipe's key with their defaults too (flytune.recipe.key)."""

    cached_by: ClassVar[tuple[str, ...]] = ("name",)
    """Fields that decide about what a frozen model computes before training."""

    def teacher(self, model: Model) -> Model | None:
        """Return a further model, which runs before training, with the dtype and attention of the recipe's
        `model`; None where there is none."""
        return None

    def with_teacher_at(self, commit: str | None) -> Self:
        """Return it with the teacher at a commit; unchanged without a teacher or a commit."""
        return self

    @property
    def bytes_of_a_token(self) -> int:
        """Bytes that a teacher's results take for each trained token."""
        return 0

    @property
    def reward_names(self) -> list[str]:
        """Names of the rewards of each answer that the model draws; none where nothing judges them."""
        return []

    def total(self, values: Sequence[float]) -> float:
        """Return the reward of an answer, of the values of its rewards."""
        return 0.0

    @property
    def own_code(self) -> list[str]:
        """Names of the functions whose code it carries, which the run executes."""
        return []

    @property
    def own_places(self) -> list[str]:
        """Fields with a program that the run starts, or a server or folder that it sends to, as
        `field: value`."""
        return []

    @property
    def classes(self) -> list[str]:
        """Names of the labels that its rows have, in the order of the model's outputs; empty of other
        objectives."""
        return []

    @property
    def labelling(self) -> str:
        """Return transformers' name of the problem whose labels its rows have; empty of other objectives."""
        return ""

    @property
    def negatives_of_a_row(self) -> int:
        """Number of documents of a row that do not belong to its query; 0 of other objectives."""
        return 0

    @property
    def text_prompts(self) -> list[str]:
        """Texts before each query and before each document; empty where there are none."""
        return []

    @property
    def judged_by(self) -> Any:
        """Return the part that judges reference answers while data is prepared; None where nothing does."""
        return None

    @property
    def reward_scale(self) -> float:
        """Factor of the difference of log-probabilities that is an answer's reward."""
        return 1.0

    def problems(self, data: Data, training: Training) -> list[str]:
        """List the fields of other sections that contradict the objective, with what to do, a line each."""
        name = self.name  # type: ignore[attr-defined]  # each section has one
        formats = {source.format for source in data.all_sources.values()}
        problems = [
            f"data.format: {form} {reason}"
            for form, reason in self.refused_formats.items()
            if form in formats
        ]
        if data.images and not self.reads_images:
            problems.append(
                f"data.images: objective: {name} trains text alone; write objective: sft, or leave the "
                "images out"
            )
        if self.formats is not None and (other := sorted(formats - {"auto", *self.formats})):
            able = f"{', '.join(self.formats)}, or auto" if self.formats else "auto"
            problems.append(f"data.format: {other[0]}, but objective: {name} {self.reads}; write {able}")
        sections: dict[str, Section] = {"data": data, "training": training}
        return [*problems, *refusals(self.refused, sections, name)]


def refusals(refused: dict[str, str], sections: dict[str, Section], name: str) -> Iterator[str]:
    """Yield the sentences about those fields of some sections, by name, that are refused
    (ObjectiveSection.refused)."""
    for setting, reason in refused.items():
        key, _, value = setting.partition(": ")
        section, _, field = key.partition(".")
        has = str(getattr(sections[section], field)).lower()
        if has == value if value else sections[section].changed(field):
            yield setting + (", " if reason.startswith("but ") else ": ") + reason.format(name=name)


OF_COMPARED_ANSWERS = (5e-6, 1e-4)
"""Largest usual learning rates of losses relative to a reference (Rafailov et al. 2023; Ethayarajh et al.
2024; Shao et al. 2024)."""


class ComparingSection(ObjectiveSection):
    """An objective whose rows are better and worse answers."""

    formats: ClassVar[tuple[str, ...] | None] = ("preference",)
    reads = "compares two answers"
    refused: ClassVar[dict[str, str]] = {
        "data.packing": "objective: {name} pads its rows: TRL has no packing for it; remove it",
        "data.too_long: split": "but a piece of an answer is not an answer that objective: {name} could "
        "compare; use truncate, drop or error",
        "data.completion_only_loss: false": "but objective: {name} compares answers alone; remove it",
        "training.neftune_noise_alpha": "its noise would be in the reference of objective: {name} too, and "
        "in each log-ratio; remove it",
        "training.torch_compile": "not tested with objective: {name}, whose reference is a second forward "
        "pass of the same layers; remove it",
    }

    disable_dropout: bool = True
    """Switch dropout off in policy and reference, or in the reward model; the adapter's (method.lora_dropout)
    too."""


class ReferenceSection(ComparingSection):
    """An objective whose rewards are differences from a reference model."""

    beta: Weight = 0.1
    """Strength of the bond to the reference model; of ipo, the paper's tau."""

    @property
    def reward_scale(self) -> float:
        return self.beta
