"""The section of objective reward."""

from typing import ClassVar, Literal

from flytune.recipe.objectives.base import ComparingSection, Weight
from flytune.row_names import PAIRS, RowKindName


class Reward(ComparingSection):
    """A reward model of pairs: one number for an answer."""

    row_kind: ClassVar[RowKindName] = PAIRS
    head: ClassVar[str] = "scalar"
    refused: ClassVar[dict[str, str]] = {
        **ComparingSection.refused,
        "training.router_aux_loss_coef": "TRL has no balance loss for objective: {name}; leave it out",
    }

    name: Literal["reward"]
    """`reward` trains a reward model of pairs: one number for an answer (docs/objectives.md)."""
    center_rewards_coefficient: Weight | None = None
    """Weight of a term that draws the mean reward to 0 (Eisenstein et al. 2023, eq. 2); 0.01 is usual."""
