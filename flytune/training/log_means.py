"""Means in TRL's logs, over all that was trained since the last log line.

TRL averages its figures over micro batches, as if each had equally many tokens or rows, and counts one that
has none as 0: the figure of a step would follow from the micro batch.
"""

from collections.abc import Callable
from typing import Any


class LogMeans:
    """Means over trained tokens or rows, weighted by how many of them each micro batch has."""

    def __init__(self, log_counts: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """`log_counts` returns, by the name in TRL's logs, the number of tokens or rows of a micro batch:
        int64 ()."""
        self._log_counts = log_counts
        self._counts: list[dict[str, Any]] = []

    def count(self, batch: dict[str, Any]) -> None:
        """Count a micro batch before its forward pass."""
        self._counts.append(self._log_counts(batch))

    def weigh(self, metrics: dict[str, list[float]], accelerator: Any) -> None:
        """Replace the values of the micro batches in TRL's `metrics` by their mean, in place; none where
        nothing was counted.

        Every process calls it after equally many micro batches.
        """
        import torch

        batches, self._counts = self._counts, []
        if not batches or not batches[0]:
            return
        table = torch.stack([torch.stack([*counts.values()]) for counts in batches])
        of_all_processes = accelerator.reduce(table, reduction="sum").T.tolist()
        for name, counts in zip(batches[0], of_all_processes, strict=True):
            values = metrics.pop(name, [])
            if len(values) < len(counts):
                # TRL has no value of a micro batch without a row of the label.
                counts = [count for count in counts if count]
            if values and sum(counts):
                total = sum(value * count for value, count in zip(values, counts, strict=True) if count)
                metrics[name] = [total / sum(counts)]
