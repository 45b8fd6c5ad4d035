"""The section of objective classify."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from flytune import limits
from flytune.recipe.objectives.base import ObjectiveSection, Weight
from flytune.row_names import CLASSIFIED, RowKindName

MOST_LABELS = 1000
"""Largest number of labels."""
ProblemType = Literal["single_label_classification", "multi_label_classification"]


def _as_text(value: object) -> object:
    """Return a number, which YAML reads from `labels: [0, 1]`, as the name that it is."""
    return str(value) if type(value) is int else value


LabelName = Annotated[
    str,
    Field(min_length=1, max_length=limits.NAME, pattern=r"^[^\x00-\x1f\x7f]+$"),
    BeforeValidator(_as_text),
]


class Classify(ObjectiveSection):
    """A classifier of texts: the probabilities of named labels."""

    row_kind: ClassVar[RowKindName] = CLASSIFIED
    head: ClassVar[str] = "classes"
    refused_formats: ClassVar[dict[str, str]] = {
        "preference": "has two answers in a row, and objective: classify labels one text; write objective: "
        "reward",
        "unpaired": "has a prompt with an answer; write prompt_completion for objective: classify",
    }
    refused: ClassVar[dict[str, str]] = {
        "data.packing: true": "objective: {name} pads its rows; remove it",
        "data.min_trained_fraction": "objective: {name} has no loss of tokens; remove it",
        "data.too_long: split": "objective: {name} cannot give the label of a text to its pieces; use "
        "truncate, drop or error",
        "data.completion_only_loss: false": "objective: {name} has one loss for a row, whatever its tokens "
        "are; remove it",
        "training.router_aux_loss_coef": "objective: {name} has no balance loss; leave it out",
        "training.neftune_noise_alpha": "objective: {name} is not tested with noise; remove it",
        "training.torch_compile": "objective: {name} is not tested with it; remove it",
    }

    name: Literal["classify"]
    """`classify` trains a classifier of texts with named labels (docs/objectives.md)."""
    labels: Annotated[list[LabelName], Field(min_length=2, max_length=MOST_LABELS)] = Field(
        default=["0", "1"]
    )
    """Names of the labels, in the order of the model's outputs; a number in the data is a place in it, from 0
    on, unless a name is a number."""
    problem_type: ProblemType = "single_label_classification"
    """`single_label_classification`: a row has one label; `multi_label_classification`: it has several, or
    none."""
    class_weight: dict[LabelName, Weight] = Field(default={})
    """Factors of the losses of labels, by name; 1 for those that it does not name."""

    @model_validator(mode="after")
    def _known_labels(self) -> Self:
        twice = sorted({label for label in self.labels if self.labels.count(label) > 1})
        if twice:
            raise ValueError(f"labels: {twice[0]} is there twice; each label needs a name of its own")
        if unknown := sorted(self.class_weight.keys() - {*self.labels}):
            raise ValueError(f"class_weight: {unknown[0]} is none of labels ({', '.join(self.labels)[:200]})")
        return self

    @property
    def classes(self) -> list[str]:
        return self.labels

    @property
    def labelling(self) -> str:
        return self.problem_type

    @property
    def has_several_labels(self) -> bool:
        """Return whether a row may have several labels, or none."""
        return self.problem_type == "multi_label_classification"

    @property
    def weights(self) -> list[float]:
        """Return the factor of each label's loss, in the order of labels."""
        return [self.class_weight.get(label, 1.0) for label in self.labels]
