"""The section of objective distill."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from flytune import limits
from flytune.recipe.data import Data
from flytune.recipe.objectives.base import ObjectiveSection
from flytune.recipe.sections import Model
from flytune.recipe.training import Training
from flytune.schema import PathOrAddress

MOST_TOKENS = 1024
"""Largest number of a teacher's tokens that are kept for each trained token."""


class Distill(ObjectiveSection):
    """Distillation: it trains the distributions that a teacher has for the tokens of the answers."""

    refused_formats: ClassVar[dict[str, str]] = {
        "preference": "has two answers in a row, and objective: distill trains one; write objective: dpo",
        "unpaired": "has undesirable answers, and objective: distill trains all; write objective: kto",
    }

    cached_by: ClassVar[tuple[str, ...]] = (
        "name",
        "teacher_model_name_or_path",
        "teacher_model_revision",
        "loss_top_k",
        "temperature",
    )

    name: Literal["distill"]
    """`distill` trains a teacher's distributions of the answers' tokens (docs/objectives.md)."""
    teacher_model_name_or_path: PathOrAddress | None = None
    """The teacher: a hub id, a folder or an address of a model with the same tokenizer."""
    teacher_model_revision: str | None = None
    """Commit, tag or branch of the teacher on the hub."""
    loss_top_k: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 64
    """Number of the teacher's most probable tokens that are kept for each trained token."""
    temperature: Annotated[float, Field(ge=limits.LEAST_TEMPERATURE, le=limits.FACTOR)] = 1.0
    """Divisor of the logits of both models."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Interpolation of the divergence: 0.0 is the forward KL divergence, 1.0 the reverse one; between them it
    is the generalized Jensen-Shannon divergence (Agarwal et al. 2024, eq. 1)."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Weight of the data's own loss; the divergence has 1 - alpha."""

    def teacher(self, model: Model) -> Model | None:
        if self.teacher_model_name_or_path is None:
            return None
        return Model(
            name_or_path=self.teacher_model_name_or_path,
            revision=self.teacher_model_revision,
            dtype=model.dtype,
            attn_implementation=model.attn_implementation,
        )

    @property
    def bytes_of_a_token(self) -> int:
        # Of each token that is kept its number and its log-probability, and one of the data's own token.
        return 8 * self.loss_top_k + 4

    def problems(self, data: Data, training: Training) -> list[str]:
        problems = super().problems(data, training)
        if data.packing:
            problems.append(
                "data.packing: objective: distill reads the teacher's tokens row by row, and a packed block "
                "has several; remove it"
            )
        if training.router_aux_loss_coef:
            problems.append(
                "training.router_aux_loss_coef: objective: distill has no balance loss of experts; write 0"
            )
        return problems
