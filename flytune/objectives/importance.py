"""Importance weights of answers that another engine has drawn: the trained model's probability over the
engine's.

As TRL's GRPOTrainer with vLLM (its arguments vllm_importance_sampling_*): a weight of each token, or of a
whole answer, is set to its bound or to 0 where it is outside of the bounds, and multiplies the loss of the
tokens. Both log-probabilities are those of the ledger, so that a step that is replayed has the same weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flytune.errors import TrainingError
from flytune.recipe import Grpo, VllmEngine
from flytune.rollouts import Rollout

MEAN_BOUND = (0.5, 2.0)
"""Bounds of the mean weight of a step. Its expectation is 1 where both engines have the same weights; below,
most of what was drawn is cut, and above, some answers count several times."""
MEAN, LARGEST, CUT = "importance_mean", "importance_max", "importance_cut"
"""Names of a step's figures."""


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights of the answers of a step."""

    values: Any
    """float32 (answers, longest), or (answers, 1) where an answer has one; 1 beside its tokens."""
    figures: dict[str, float]
    """Mean of the weights that are trained, the largest before it was cut, and the share that was cut."""

    def check(self, step: int) -> None:
        """Check the mean.

        Raises:
            TrainingError: it is outside of its bounds.
        """
        mean, (low, high) = self.figures[MEAN], MEAN_BOUND
        if low <= mean <= high:
            return
        raise TrainingError(
            f"step {step}: the mean importance weight of vLLM's answers is {mean:.3g}, outside of {low:g} to "
            f"{high:g}; the largest is {self.figures[LARGEST]:.3g}, and {self.figures[CUT]:.0%} are cut "
            "(objective.engine.vllm_importance_sampling_mode). vLLM's rounding is too far from the trainer's "
            "for this length: use mode token_truncate, model.dtype float32, shorter answers, or engine: "
            "transformers"
        )

    def of_batch(self, places: Sequence[int], longest: int) -> dict[str, Any]:
        """Return TRL's entry of a micro batch with the answers at these places of the step."""
        return {"importance_sampling_ratio": self.values[list(places)][:, :longest]}


def weights_of(section: Grpo, answers: Sequence[tuple[Rollout, bool]]) -> ImportanceWeights | None:
    """Return the weights of a step's answers, each with whether it is left out of the loss; None where the
    trained model has drawn them."""
    if not isinstance(section.engine, VllmEngine):
        return None
    import torch

    longest = max(len(answer.tokens) for answer, _ in answers)
    distances, is_trained = torch.zeros(len(answers), longest), torch.zeros(len(answers), longest)
    for place, (answer, is_masked) in enumerate(answers):
        length = 0 if is_masked else len(answer.tokens)
        trained, drawn = torch.tensor(answer.trained_log_probs), torch.tensor(answer.log_probs)
        distances[place, :length] = (trained - drawn)[:length]
        is_trained[place, :length] = 1
    if section.engine.weighs_answers:
        distances, is_trained = distances.sum(-1, keepdim=True), is_trained.amax(-1, keepdim=True)
    ratios = distances.exp()
    values, outside = section.engine.cut(ratios)
    counted = is_trained.bool()
    if not counted.any():
        return ImportanceWeights(values, {MEAN: 1.0, LARGEST: 1.0, CUT: 0.0})
    figures = {
        MEAN: float(values[counted].mean()),
        LARGEST: float(ratios[counted].max()),
        CUT: float(outside[counted].float().mean()),
    }
    return ImportanceWeights(values, figures)
