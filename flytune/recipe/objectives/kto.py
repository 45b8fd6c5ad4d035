"""The section of objective kto."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from flytune.recipe.data import Data
from flytune.recipe.objectives.base import OF_COMPARED_ANSWERS, ReferenceSection, Weight
from flytune.recipe.training import Training
from flytune.row_names import LABELLED_ANSWERS, RowKindName

LossType = Literal["kto", "apo_zero_unpaired"]


class Kto(ReferenceSection):
    """Kahneman-Tversky optimization: it trains answers that are labelled desirable or undesirable."""

    row_kind: ClassVar[RowKindName] = LABELLED_ANSWERS
    usual_learning_rates: ClassVar[tuple[float, float]] = OF_COMPARED_ANSWERS
    formats = ("unpaired", "preference")
    reads = "compares labelled answers"
    # The one section of all objectives, up to 0.6, had another default.
    always_in_key: ClassVar[tuple[str, ...]] = ("loss_type",)

    name: Literal["kto"]
    """`kto` trains answers that are labelled desirable or undesirable (docs/objectives.md)."""
    loss_type: list[LossType] = Field(default=["kto"])
    """One loss: `kto`, or `apo_zero_unpaired`, which estimates no KL divergence."""
    desirable_weight: Weight = 1.0
    """Factor of the loss of desirable answers."""
    undesirable_weight: Weight = 1.0
    """Factor of the loss of undesirable answers."""

    @field_validator("loss_type", mode="before")
    @classmethod
    def _one_loss(cls, value: object) -> object:
        """Accept `kto` for `[kto]`."""
        return [value] if isinstance(value, str) else value

    @field_validator("loss_type")
    @classmethod
    def _only_one(cls, value: list[LossType]) -> list[LossType]:
        if len(value) != 1:
            raise ValueError("kto has one loss (TRL adds none); name one")
        return value

    def problems(self, data: Data, training: Training) -> list[str]:
        sentences = super().problems(data, training)
        if self.loss_type == ["kto"] and training.global_batch_size < 2:
            sentences.append(
                f"training.global_batch_size: {training.global_batch_size}, but objective: {self.name} "
                "estimates the KL divergence from prompts with the answers of other rows of the step; write "
                "2 or more, or loss_type: apo_zero_unpaired"
            )
        return sentences
