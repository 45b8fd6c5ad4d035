"""Reward models (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, §3.5), with TRL's
RewardTrainer.

A sequence classifier with one output learns to give the chosen of two answers the larger number: the loss of
a pair is minus the log sigmoid of the difference of both rewards.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flytune.models import Row, heads
from flytune.models.scoring import sequences_of
from flytune.objectives import sequence_heads
from flytune.objectives.heldout import HeldoutFigures, HeldoutRows, intervals
from flytune.objectives.sequence_heads import SequenceHeadObjective
from flytune.recipe import Reward as RewardSection
from flytune.records.figures import ACCURACY, LOSS, MARGIN, Figure
from flytune.sentences import counted


class RewardedRows(HeldoutRows):
    """Pairs by the rewards of both answers."""

    def without_words(self, model: Any) -> HeldoutFigures:
        """Return the figures of a reward model.

        Raises:
            ExportError: a reward is not finite.
        """
        import numpy

        assert isinstance(self.recipe.objective, RewardSection)
        pad, batch_size = self.tokenizer.pad_token_id, self.recipe.evaluation.batch_size
        rewards = heads.finite_scores(model, self.sequences, pad, batch_size, "reward model")[:, 0]
        chosen, rejected = numpy.split(rewards, 2)
        losses = heads.pair_losses(rewards, self.recipe.objective.center_rewards_coefficient)
        values = {"reward_accuracy": chosen > rejected, "loss": losses, "reward_margin": chosen - rejected}
        weights = numpy.ones(len(chosen), dtype=int)
        figures = {name: {"tuned": interval} for name, interval in intervals(values, weights).items()}
        return HeldoutFigures(figures, weights, {name: values[name] for name in ("reward_accuracy", "loss")})


class RewardModeling(SequenceHeadObjective):
    """TRL's RewardTrainer on pairs of sequences; all pairs have the same weight."""

    name = "reward"
    section: RewardSection
    head_of = "rewards"
    answers_with = "a reward model gives a number"
    heldout_rows = RewardedRows
    logged: ClassVar[Mapping[str, str]] = {"reward_accuracy": "accuracy", "reward_margin": "margin"}

    def figures(self) -> list[Figure]:
        update = {
            "unit": "nats per pair",
            "meaning": "minus the log sigmoid of the chosen answer's reward less the rejected one's",
            "neutral": math.log(2),
        }
        if self.section.center_rewards_coefficient:
            update |= {"meaning": f"{update['meaning']}, and the term that centers rewards"}
        loss = LOSS.model_copy(update=update | {"scaled_by": ["objective.center_rewards_coefficient"]})
        return [ACCURACY, loss, MARGIN]

    def _switches_dropout_off(self) -> bool:
        return self.section.disable_dropout

    def reasons(self) -> list[str]:
        lines = [
            f"objective: {self.name}: each row is two sequences of up to "
            f"{counted(self.recipe.data.max_length, 'token')} in one forward pass; "
            "the head has one output, so there are no logits of the vocabulary"
        ]
        if self.recipe.evaluation.sample_answers:
            lines.append("evaluation.sample_answers: a reward model answers nothing, so none are sampled")
        return lines + self.dropout_reasons()

    def arguments(self) -> dict[str, Any]:
        return {
            "center_rewards_coefficient": self.section.center_rewards_coefficient,
            "disable_dropout": self.section.disable_dropout,
            # The columns of prepared pairs are not TRL's.
            "remove_unused_columns": False,
        }

    @classmethod
    def trainer_class(cls) -> Any:
        return sequence_heads.prepared_trainer()

    def row_numbers(self, outputs: Any) -> Any:
        return outputs.logits.squeeze(-1)

    def card_text(self) -> str:
        return (
            "A reward model: one number for a prompt with its answer, of which only differences between "
            "answers to one prompt have a meaning. The base has\n"
            "no head of rewards, and so no figures."
        )

    def measure(self, trainer: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
        import numpy

        sequences = [sequence["input_ids"] for sequence in sequences_of(rows)]
        with trainer.compute_loss_context_manager():
            scores = heads.scores(trainer.model_wrapped, sequences, trainer.processing_class.pad_token_id)
        losses = heads.pair_losses(scores[:, 0], trainer.args.center_rewards_coefficient)
        return losses, numpy.ones(len(losses))


OBJECTIVE = RewardModeling
