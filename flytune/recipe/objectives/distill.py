"""The section of objective distill."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from flytune import limits
from flytune.recipe.data import Data
from flytune.recipe.objectives.base import ObjectiveSection, refusals
from flytune.recipe.sections import Model
from flytune.recipe.training import Training
from flytune.schema import PathOrAddress

_REFUSED_DRAWING = {
    "data.too_long: split": "a piece of a sample begins without a prompt",
    "data.completion_only_loss: false": "without a masked prompt there is nothing to answer to",
    "training.neftune_noise_alpha": "answers are drawn without it",
    "training.torch_compile": "not tested with drawing answers",
    "training.probe_longest": "the longest rows say nothing about the longest drawn answers",
}
"""Fields of other sections that contradict answers which the student draws."""
MOST_TOKENS = 1024
"""Largest number of a teacher's tokens that are kept for each trained token."""


class Distill(ObjectiveSection):
    """Distillation: it trains the distributions that a teacher has for the tokens of the answers: those of
    the data, or those that the student draws."""

    refused_formats: ClassVar[dict[str, str]] = {
        "preference": "has two answers in a row, and objective: distill trains one; write objective: dpo",
        "unpaired": "has undesirable answers, and objective: distill trains all; write objective: kto",
    }
    refused: ClassVar[dict[str, str]] = {
        "data.packing": "objective: {name} reads the teacher's tokens row by row, and a packed block has "
        "several; remove it"
    }

    cached_by: ClassVar[tuple[str, ...]] = (
        "name",
        "teacher_model_name_or_path",
        "teacher_model_revision",
        "loss_top_k",
        "temperature",
        "on_policy",
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
    on_policy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the rows whose answers the student draws anew in the step that trains them (Agarwal et al.
    2024, lambda); 0 trains the answers of the data alone."""
    max_completion_length: Annotated[int, Field(ge=1, le=limits.TOKENS)] = 256
    """Most tokens of a drawn answer, also limited by what the prompt leaves of data.max_length."""
    drawing_temperature: Annotated[
        float, Field(ge=limits.LEAST_TEMPERATURE, le=limits.LARGEST_TEMPERATURE)
    ] = 1.0
    """Divisor of the logits from which answers are drawn; the loss has its own, temperature."""
    per_device_generation_batch_size: Annotated[int, Field(ge=1, le=limits.MICRO_BATCH)] | None = None
    """Answers that a process draws at a time; by default as many as a micro batch has."""

    def teacher(self, model: Model) -> Model | None:
        if self.teacher_model_name_or_path is None:
            return None
        return Model(
            name_or_path=self.teacher_model_name_or_path,
            revision=self.teacher_model_revision,
            dtype=model.dtype,
            attn_implementation=model.attn_implementation,
        )

    def with_teacher_at(self, commit: str | None) -> Self:
        return self.model_copy(update={"teacher_model_revision": commit}) if commit else self

    @property
    def bytes_of_a_token(self) -> int:
        # Of each token that is kept its number and its log-probability, and one of the data's own token.
        return 8 * self.loss_top_k + 4

    def problems(self, data: Data, training: Training) -> list[str]:
        problems = super().problems(data, training)
        if training.router_aux_loss_coef:
            problems.append(
                "training.router_aux_loss_coef: objective: distill has no balance loss of experts; write 0"
            )
        if not self.on_policy:
            return problems
        end = f"; with objective.on_policy: {self.on_policy:g} remove it"
        if self.alpha:
            problems.append(f"objective.alpha: a drawn answer has no loss of the data{end}")
        if "text" in {source.format for source in data.all_sources.values()}:
            problems.append(f"data.format: text: a text has no prompt that an answer could follow{end}")
        refused = refusals(_REFUSED_DRAWING, {"data": data, "training": training}, self.name)
        return [*problems, *(reason + end for reason in refused)]
