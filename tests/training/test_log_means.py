"""Means in TRL's logs: each token counts once, whatever micro batch it is in."""

import pytest
import torch
from accelerate import Accelerator

from flytune.training.trainer import LogMeans


def weighed(counts, metrics):
    means = LogMeans(lambda batch: {name: torch.tensor(count) for name, count in batch.items()})
    for batch in counts:
        means.count(batch)
    means.weigh(metrics, Accelerator(cpu=True))
    return metrics


@pytest.mark.parametrize(
    ("values", "tokens", "mean"),
    [
        ([2.0, 5.0], [1, 3], 4.25),  # (1 x 2 + 3 x 5) / 4
        ([2.0, 0.0], [4, 0], 2.0),  # TRL writes 0 for a micro batch without a trained token
        ([2.0, 5.0], [4, 0, 1], 2.6),  # and leaves out one without a row of a label: (4 x 2 + 1 x 5) / 5
        ([float("nan"), 3.0], [0, 2], 3.0),
    ],
)
def test_a_mean_is_weighted_by_tokens(values, tokens, mean):
    found = weighed([{"entropy": count} for count in tokens], {"entropy": values, "reward": [1.0, 3.0]})
    assert found == {"entropy": [pytest.approx(mean)], "reward": [1.0, 3.0]}


def test_what_nothing_was_counted_of_is_left_out():
    assert weighed([{"entropy": 0}], {"entropy": [0.0]}) == {}
    assert weighed([], {"entropy": [1.0]}) == {"entropy": [1.0]}
