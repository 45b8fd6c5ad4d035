"""The collator: batches of rows of a prepared data set, in which no sample of a packed row sees another."""

from dataclasses import dataclass
from typing import Any

from flytune.models.scoring import IGNORED


@dataclass(frozen=True)
class Collator:
    """The Trainer's data_collator: batches of rows with input_ids and labels, for training and for scoring
    during training.

    Rows without seq_lengths are padded on the right to the longest, with an attention_mask, as TRL does.

    Rows with seq_lengths (data.packing) are padded to `max_length`: batches of one shape avoid fragmentation
    of the allocator's memory. Positions count from 0 in each sample, and are 0 in all of the padding. There
    is no attention_mask: transformers (5.23, masking_utils) separates samples by their positions only without
    one, and without a cache.
    """

    pad_token_id: int
    max_length: int
    """Tokens of a packed row."""
    flatten: bool = False
    """True for FlashAttention, which reads position_ids of a single row only: packed rows are joined into
    one, with the boundaries of the samples."""

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, Any]:
        """Return a batch of int64 tensors [rows, length]; flattened, [1, rows x max_length].

        The keys are input_ids, labels, and attention_mask or position_ids; flattened, also FlashAttention's
        arguments.
        """
        import torch

        if "seq_lengths" not in rows[0]:
            width = max(len(row["input_ids"]) for row in rows)
            mask = [_padded([1] * len(row["input_ids"]), width, 0) for row in rows]
            return self._tokens(rows, width) | {"attention_mask": torch.tensor(mask)}
        batch = self._tokens(rows, self.max_length)
        positions = [[place for length in row["seq_lengths"] for place in range(length)] for row in rows]
        batch["position_ids"] = torch.tensor([_padded(row, self.max_length, 0) for row in positions])
        # No token precedes a sample's first token, so nothing could predict it.
        batch["labels"][batch["position_ids"] == 0] = IGNORED
        return self._flattened(batch, rows) if self.flatten else batch

    def _tokens(self, rows: list[dict[str, list[int]]], width: int) -> dict[str, Any]:
        import torch

        fill = {"input_ids": self.pad_token_id, "labels": IGNORED}
        return {
            name: torch.tensor([_padded(row[name], width, value) for row in rows])
            for name, value in fill.items()
        }

    def _flattened(self, batch: dict[str, Any], rows: list[dict[str, list[int]]]) -> dict[str, Any]:
        import torch

        lengths: list[int] = []
        for row in rows:
            padding = self.max_length - sum(row["seq_lengths"])
            lengths += [*row["seq_lengths"], *([padding] if padding else [])]
        boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        flat = {name: tensor.view(1, -1) for name, tensor in batch.items()}
        return flat | {
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }


def tokens_of(batch: dict[str, Any]) -> Any:
    """Return the number of tokens of a Collator's batch without padding: a 0-dimensional tensor on the
    batch's device.

    (TRL's num_tokens counts one row of a packed batch, with its padding.)
    """
    if "attention_mask" in batch:
        return batch["attention_mask"].sum()
    # Padding has position 0, and is not followed by position 1: samples of one token train nothing and are
    # never prepared.
    starts = batch["position_ids"] == 0
    begun = starts[:, :-1] & ~starts[:, 1:]
    return (~starts).sum() + begun.sum()


def _padded(values: list[int], width: int, value: int) -> list[int]:
    return values + [value] * (width - len(values))
