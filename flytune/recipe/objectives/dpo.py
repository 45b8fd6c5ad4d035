"""The section of objective dpo."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from flytune import limits
from flytune.recipe.objectives.base import OF_COMPARED_ANSWERS, ReferenceSection
from flytune.row_names import PAIRS, RowKindName
from flytune.sentences import counted

LossType = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "apo_zero", "apo_down", "sft"
]
_SMOOTHED = ("robust", "exo_pair")


class Dpo(ReferenceSection):
    """Direct preference optimization: it trains preferences between two answers to a prompt."""

    row_kind: ClassVar[RowKindName] = PAIRS
    usual_learning_rates: ClassVar[tuple[float, float]] = OF_COMPARED_ANSWERS

    name: Literal["dpo"]
    """`dpo` trains preferences between two answers to a prompt (docs/objectives.md)."""
    loss_type: list[LossType] = Field(default=["sigmoid"])
    """Losses, which are added: TRL's names; `sft` is the loss of the chosen answers."""
    loss_weights: list[Annotated[float, Field(ge=0, le=limits.FACTOR)]] = Field(default=[])
    """Weight of each loss in loss_type; 1 by default."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are labelled the wrong way round (robust), or the epsilon of exo_pair."""
    precompute_ref_log_probs: bool | Literal["auto"] = "auto"
    """Compute the reference's log-probabilities once, in a task before training; `auto` where no step can run
    the reference."""

    @field_validator("loss_type", mode="before")
    @classmethod
    def _one_loss(cls, value: object) -> object:
        """Accept `ipo` for `[ipo]`."""
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fields_of_losses(self) -> Self:
        if not self.loss_type or len(set(self.loss_type)) < len(self.loss_type):
            raise ValueError("loss_type: name each loss once, and at least one")
        if self.loss_type == ["sft"]:
            raise ValueError(
                "loss_type: sft alone compares nothing; add a loss of pairs, or write objective: sft"
            )
        if self.loss_weights and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(
                f"loss_weights: {counted(len(self.loss_weights), 'weight')} for "
                f"{counted(len(self.loss_type), 'loss', 'losses')} (loss_type); give as many"
            )
        if self.loss_weights and max(self.loss_weights) < limits.LEAST_FACTOR:
            raise ValueError(
                f"loss_weights: {self.loss_weights}: all losses count for nothing, so the run would learn "
                "nothing; give one of them a weight, 1 for example"
            )
        smoothed = [name for name in self.loss_type if name in _SMOOTHED]
        if self.label_smoothing and not smoothed:
            raise ValueError(
                f"label_smoothing: only {' and '.join(_SMOOTHED)} use it, and loss_type has none of them"
            )
        if "exo_pair" in smoothed and not self.label_smoothing:
            raise ValueError("label_smoothing: exo_pair needs one above 0 (its paper takes 1e-3)")
        return self
