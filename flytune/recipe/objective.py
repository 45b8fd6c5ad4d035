"""The section `objective` of a recipe."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from flytune import limits
from flytune.recipe.data import Data
from flytune.recipe.training import Training
from flytune.schema import Strict

LossType = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "apo_zero", "apo_down", "sft", "kto", "apo_zero_unpaired"
]  # fmt: skip
_SMOOTHED = ("robust", "exo_pair")
_UNPAIRED = ("kto", "apo_zero_unpaired")
"""Losses of objective kto; all others are dpo's."""
_WEIGHT = Annotated[float, Field(gt=0, le=limits.FACTOR)]
_FIELDS = {
    "sft": (),
    "dpo": ("loss_type", "loss_weights", "beta", "label_smoothing", "disable_dropout", "precompute_ref_log_probs"),
    "kto": ("loss_type", "beta", "desirable_weight", "undesirable_weight", "disable_dropout"),
    "reward": ("disable_dropout", "center_rewards_coefficient"),
}
"""Fields that each objective reads."""


class Objective(Strict):
    """The goal of training: the loss, and the kind of rows that it needs."""

    name: Literal["sft", "dpo", "kto", "reward"] = Field(default="sft", json_schema_extra={"since": "0.2.0"})
    """`sft` trains answers; `dpo` trains preferences between two answers to a prompt, `kto` answers that are labelled desirable
    or undesirable, `reward` a reward model of pairs: one number for an answer (docs/objectives.md)."""
    loss_type: list[LossType] = Field(default=["sigmoid"], json_schema_extra={"since": "0.2.0"})
    """Losses of dpo, which are added: TRL's names; `sft` is the loss of the chosen answers. Of kto one: `kto`, its default, or
    `apo_zero_unpaired`."""
    loss_weights: list[Annotated[float, Field(ge=0, le=limits.FACTOR)]] = Field(
        default=[], json_schema_extra={"since": "0.2.0"}
    )
    """Weight of each loss in loss_type; 1 by default."""
    beta: Annotated[float, Field(gt=0, le=limits.FACTOR)] = Field(default=0.1, json_schema_extra={"since": "0.2.0"})
    """Strength of the bond to the reference model; of ipo, the paper's tau."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(default=0.0, json_schema_extra={"since": "0.2.0"})
    """Share of pairs that are labelled the wrong way round (robust), or the epsilon of exo_pair."""
    desirable_weight: _WEIGHT = Field(default=1.0, json_schema_extra={"since": "0.2.0"})
    """Factor of the loss of desirable answers (kto)."""
    undesirable_weight: _WEIGHT = Field(default=1.0, json_schema_extra={"since": "0.2.0"})
    """Factor of the loss of undesirable answers (kto)."""
    disable_dropout: bool = Field(default=True, json_schema_extra={"since": "0.2.0"})
    """Switch dropout off in policy and reference, or in the reward model; the adapter's (method.lora_dropout) too."""
    center_rewards_coefficient: Annotated[float, Field(gt=0, le=limits.FACTOR)] | None = Field(
        default=None, json_schema_extra={"since": "0.2.0"}
    )
    """Weight of a term of reward that draws the mean reward to 0 (Eisenstein et al. 2023, eq. 2); 0.01 is usual."""

    precompute_ref_log_probs: bool | Literal["auto"] = Field(default="auto", json_schema_extra={"since": "0.2.0"})
    """Compute the reference's log-probabilities once, in a task before training; `auto` where no step can run the reference."""

    @property
    def has_pairs(self) -> bool:
        """True if it trains on pairs of a chosen and a rejected answer."""
        return self.name in ("dpo", "reward")

    @property
    def has_labels(self) -> bool:
        """True if it trains on answers that are labelled desirable or undesirable."""
        return self.name == "kto"

    @property
    def estimates_kl(self) -> bool:
        """True if its loss compares rewards with an estimate of the KL divergence, from answers to other prompts."""
        return "kto" in self.loss_type

    @model_validator(mode="before")
    @classmethod
    def _default_loss(cls, values: object) -> object:
        """Give kto its own loss."""
        return {"loss_type": ["kto"]} | values if isinstance(values, dict) and values.get("name") == "kto" else values

    @property
    def is_reward_model(self) -> bool:
        """True if it trains a reward model: a head `score` of one output in the place of the language model's head."""
        return self.name == "reward"

    @field_validator("loss_type", mode="before")
    @classmethod
    def _one_loss(cls, value: object) -> object:
        """Accept `ipo` for `[ipo]`."""
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fields_of_losses(self) -> Self:
        changed = [name for name, value in self if name != "name" and value != type(self).model_fields[name].default]
        if other := [name for name in changed if name not in _FIELDS[self.name]]:
            able = " or ".join(name for name, fields in _FIELDS.items() if set(other) <= set(fields))
            raise ValueError(f"{', '.join(other)}: only for name: {able or 'dpo'}, and this is {self.name}; remove them")
        if not self.loss_type or len(set(self.loss_type)) < len(self.loss_type):
            raise ValueError("loss_type: name each loss once, and at least one")
        if self.name != "sft" and (other := [name for name in self.loss_type if (name in _UNPAIRED) != self.has_labels]):
            raise ValueError(f"loss_type: {', '.join(other)} is no loss of {self.name}: kto has {' and '.join(_UNPAIRED)}")
        if self.has_labels and len(self.loss_type) > 1:
            raise ValueError("loss_type: kto has one loss (TRL adds none); name one")
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
        found = []
        if self.name == "sft":
            if "preference" in formats:
                found = [
                    "data.format: preference has two answers in a row, and objective: sft trains one; write objective: dpo"
                ]
            if "unpaired" in formats:
                found.append(
                    "data.format: unpaired has undesirable answers, and objective: sft trains all; write objective: kto"
                )
            return found
        able = ["unpaired", "preference"] if self.has_labels else ["preference"]
        if other := sorted(formats - {"auto", *able}):
            compares = "labelled answers" if self.has_labels else "two answers"
            found.append(
                f"data.format: {other[0]}, but objective: {self.name} compares {compares}; write {', '.join(able)}, or auto"
            )
        if self.estimates_kl and training.global_batch_size < 2:
            found.append(
                f"training.global_batch_size: {training.global_batch_size}, but objective: {self.name} estimates the KL "
                "divergence from prompts with the answers of other rows of the step; write 2 or more, or loss_type: "
                "apo_zero_unpaired"
            )
        if data.packing:
            found.append(f"data.packing: objective: {self.name} pads its rows: TRL has no packing for it; remove it")
        if data.too_long == "split":
            found.append(
                f"data.too_long: split, but a piece of an answer is no answer that objective: {self.name} could compare; use "
                "truncate, drop or error"
            )
        if not data.completion_only_loss:
            found.append(f"data.completion_only_loss: false, but objective: {self.name} compares answers alone; remove it")
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
