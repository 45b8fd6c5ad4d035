"""The section of objective reward."""

from typing import ClassVar, Literal

from flytune.recipe.data import Data
from flytune.recipe.objectives.base import ComparingSection, Weight
from flytune.recipe.training import Training
from flytune.row_names import PAIRS, RowKindName


class Reward(ComparingSection):
    """A reward model of pairs: one number for an answer."""

    row_kind: ClassVar[RowKindName] = PAIRS
    head: ClassVar[str] = "scalar"

    name: Literal["reward"]
    """`reward` trains a reward model of pairs: one number for an answer (docs/objectives.md)."""
    center_rewards_coefficient: Weight | None = None
    """Weight of a term that draws the mean reward to 0 (Eisenstein et al. 2023, eq. 2); 0.01 is usual."""

    def problems(self, data: Data, training: Training) -> list[str]:
        sentences = super().problems(data, training)
        if training.router_aux_loss_coef is not None:
            sentences.append(
                f"training.router_aux_loss_coef: TRL has no balance loss for objective: {self.name}; leave "
                "it out"
            )
        return sentences
