"""Accuracy and margin of a reward model on held-out pairs."""

import math
import time
from collections.abc import Sequence
from typing import Any

from flytune.console import step_lines
from flytune.models import Row, bootstrap, reward_head
from flytune.models.scoring import sequences_of
from flytune.recipe import Recipe
from flytune.records import Metrics, RewardScore, Score


def reward_metrics(recipe: Recipe, model: Any, rows: Sequence[Row], pad_token_id: int, started: float) -> Metrics:
    """Return the metrics of a reward model on pairs; `started` is the time.perf_counter of the evaluation's start.

    Raises:
        ExportError: a reward is not finite.
    """
    import numpy

    sequences = sequences_of(rows)
    found = reward_head.finite_rewards(model, sequences, pad_token_id, recipe.evaluation.batch_size, "reward model")
    chosen, rejected = numpy.split(found, 2)
    losses = reward_head.pair_losses(found, recipe.objective.center_rewards_coefficient)
    columns = [chosen > rejected, chosen - rejected, losses, losses - math.log(2)]
    values = numpy.stack([numpy.asarray(column, dtype=float) for column in columns], axis=1)
    ends = bootstrap(values, numpy.ones(len(rows), dtype=int))
    accuracy, margin, loss, difference = zip(*ends, strict=True)
    step_lines.show(
        f"held-out pairs  chosen answer's reward larger in {accuracy[0]:.0%}  margin {step_lines.number(margin[0])}"
    )
    return Metrics(
        base=_score((math.log(2),) * 3),
        tuned=_score(loss),
        loss_difference=difference[0],
        loss_difference_low=difference[1],
        loss_difference_high=difference[2],
        samples=len(rows),
        tokens=sum(len(one["input_ids"]) for one in sequences),
        loaded_as=recipe.method.quantized.removesuffix("_double") if recipe.method.name == "qlora" else recipe.model.dtype,
        answers=[],
        reward=RewardScore(
            pairs=len(rows),
            accuracy=accuracy[0],
            accuracy_low=accuracy[1],
            accuracy_high=accuracy[2],
            margin=margin[0],
            margin_low=margin[1],
            margin_high=margin[2],
        ),
        seconds=time.perf_counter() - started,
    )


def _score(loss: tuple[float, float, float]) -> Score:
    """Return a loss of pairs, with 1 for perplexities, which it has none of."""
    return Score(loss=loss[0], loss_low=loss[1], loss_high=loss[2], perplexity=1.0, perplexity_low=1.0, perplexity_high=1.0)
