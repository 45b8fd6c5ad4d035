"""The section `objective` of a recipe."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from flytune import limits
from flytune.recipe.data import Data
from flytune.recipe.training import Training
from flytune.schema import Strict

LossType = Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "apo_zero", "apo_down", "sft"]
_SMOOTHED = ("robust", "exo_pair")


class Objective(Strict):
    """The goal of training: the loss, and the kind of rows that it needs."""

    name: Literal["sft", "dpo"] = Field(default="sft", json_schema_extra={"since": "0.2.0"})
    """`sft` trains answers; `dpo` trains preferences between two answers to a prompt (docs/objectives.md)."""
    loss_type: list[LossType] = Field(default=["sigmoid"], json_schema_extra={"since": "0.2.0"})
    """Losses of dpo, which are added: TRL's names; `sft` is the loss of the chosen answers."""
    loss_weights: list[Annotated[float, Field(ge=0, le=limits.FACTOR)]] = Field(
        default=[], json_schema_extra={"since": "0.2.0"}
    )
    """Weight of each loss in loss_type; 1 by default."""
    beta: Annotated[float, Field(gt=0, le=limits.FACTOR)] = Field(default=0.1, json_schema_extra={"since": "0.2.0"})
    """Strength of the bond to the reference model; of ipo, the paper's tau."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(default=0.0, json_schema_extra={"since": "0.2.0"})
    """Share of pairs that are labelled the wrong way round (robust), or the epsilon of exo_pair."""
    disable_dropout: bool = Field(default=True, json_schema_extra={"since": "0.2.0"})
    """Switch dropout off in policy and reference, the adapter's (method.lora_dropout) too."""

    precompute_ref_log_probs: bool | Literal["auto"] = Field(default="auto", json_schema_extra={"since": "0.2.0"})
    """Compute the reference's log-probabilities once, in a task before training; `auto` where no step can run the reference."""

    @property
    def has_pairs(self) -> bool:
        """True if it trains on pairs of a chosen and a rejected answer."""
        return self.name != "sft"

    @field_validator("loss_type", mode="before")
    @classmethod
    def _one_loss(cls, value: object) -> object:
        """Accept `ipo` for `[ipo]`."""
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fields_of_losses(self) -> Self:
        changed = [name for name, value in self if name != "name" and value != type(self).model_fields[name].default]
        if not self.has_pairs and changed:
            raise ValueError(f"{', '.join(changed)}: only for preference tuning; write name: dpo, or remove them")
        if not self.loss_type or len(set(self.loss_type)) < len(self.loss_type):
            raise ValueError("loss_type: name each loss once, and at least one")
        if self.loss_type == ["sft"]:
            raise ValueError("loss_type: sft alone compares nothing; add a loss of pairs, or write objective: sft")
        if self.loss_weights and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(
                f"loss_weights: {len(self.loss_weights)} weights for {len(self.loss_type)} losses (loss_type); give as many"
            )
        smoothed = [name for name in self.loss_type if name in _SMOOTHED]
        if self.label_smoothing and not smoothed:
            raise ValueError(f"label_smoothing: only {' and '.join(_SMOOTHED)} use it, and loss_type has none of them")
        if "exo_pair" in smoothed and not self.label_smoothing:
            raise ValueError("label_smoothing: exo_pair needs one above 0 (its paper takes 1e-3)")
        return self

    def problems(self, data: Data, training: Training) -> list[str]:
        """List the fields of other sections that contradict the objective, with what to do, a line each."""
        formats = {source.format for source in data.all_sources.values()}
        if not self.has_pairs:
            if "preference" not in formats:
                return []
            return ["data.format: preference has two answers in a row, and objective: sft trains one; write objective: dpo"]
        found = []
        if other := sorted(formats - {"auto", "preference"}):
            found.append(f"data.format: {other[0]}, but objective: {self.name} compares two answers; write preference, or auto")
        if data.packing:
            found.append(
                f"data.packing: objective: {self.name} pads its rows: the two answers of a pair are in one batch, side by side "
                "(TRL has no packing for it); remove it"
            )
        if data.too_long == "split":
            found.append(
                f"data.too_long: split, but a piece of an answer is no answer that objective: {self.name} could compare; use "
                "truncate, drop or error"
            )
        if not data.completion_only_loss:
            found.append(
                f"data.completion_only_loss: false, but objective: {self.name} compares answers, and the prompt is the same in "
                "both; remove it"
            )
        if training.neftune_noise_alpha is not None:
            found.append(
                f"training.neftune_noise_alpha: its noise would be in the reference of objective: {self.name} too, and in each "
                "log-ratio; remove it"
            )
        if training.torch_compile:
            found.append(
                f"training.torch_compile: not tested with objective: {self.name}, whose reference is a second forward pass of "
                "the same layers; remove it"
            )
        return found
