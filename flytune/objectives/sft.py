"""Supervised fine-tuning: the loss of the answers' tokens."""

from collections.abc import Sequence
from typing import Any

from flytune.models import Row, heldout_loss
from flytune.models.scoring import IGNORED, uses_fused_head
from flytune.objectives.base import ObjectiveBase
from flytune.records.figures import LOSS, PERPLEXITY, Figure


class Supervised(ObjectiveBase):
    """TRL's SFTTrainer; the weight of a row is its number of trained tokens."""

    name = "sft"
    head_outputs = ("log_probs", "entropy", "is_top1")

    def figures(self) -> list[Figure]:
        return [PERPLEXITY, LOSS]

    def log_counts(self, batch: dict[str, Any]) -> dict[str, Any]:
        labels = batch.get("shift_labels", batch["labels"][:, 1:])
        return dict.fromkeys(("entropy", "mean_token_accuracy"), (labels != IGNORED).sum())

    def arguments_class(self) -> Any:
        from trl import SFTConfig

        return SFTConfig

    def arguments(self) -> dict[str, Any]:
        # The Trainer would leave the images of rows out.
        return {
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "remove_unused_columns": not self.recipe.data.images,
        }

    @classmethod
    def trainer_class(cls) -> Any:
        from trl import SFTTrainer

        return SFTTrainer

    def measure(self, trainer: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
        return heldout_loss(
            trainer.model_wrapped,
            rows,
            trainer.processing_class.pad_token_id,
            1,
            label="scoring",
            fused_head=uses_fused_head(self.recipe),
            sequence=trainer.sequence,
        )


OBJECTIVE = Supervised
