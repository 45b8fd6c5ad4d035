"""Held-out samples and their loss, for training (the live model) and evaluation (the exported model)."""

import hashlib
import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from flytune.errors import ExportError

IGNORED = -100
"""Label of a token that is not part of the loss."""
GATE_SAMPLES = 8
"""Held-out samples that the live model is scored on before export; the evaluation compares the export with
them."""
# Rows of logits that are converted to float32 at a time: 512 MB for a vocabulary of 128k.
_LOGIT_ROWS = 1024
RESAMPLES = 2000
"""Number of resamples of the bootstrap."""

Row = dict[str, Any]
"""Sample with input_ids and labels, lists of equal length; a pair also has seq_lengths, the lengths of its
two sequences, and a labelled answer label, 1 or 0."""


def sequences_of(rows: Sequence[Row]) -> list[Row]:
    """Return the sequences of all rows: of pairs first the chosen sequence of each, then the rejected ones;
    of labelled answers the desirable ones first; else the rows."""
    if rows and "label" in rows[0]:
        return sorted(rows, key=lambda row: -row["label"])
    if not rows or "seq_lengths" not in rows[0]:
        return list(rows)
    chosen = [_part(row, 0, row["seq_lengths"][0]) for row in rows]
    return chosen + [_part(row, row["seq_lengths"][0], len(row["input_ids"])) for row in rows]


def gate_sequences(rows: Sequence[Row]) -> list[Row]:
    """Return the sequences of all rows, of which those of prompts without a reference answer have the
    prompt's labels."""
    return [
        row | {"labels": [IGNORED, *row["input_ids"][1:]]}
        if "fields" in row and all(label == IGNORED for label in row["labels"])
        else row
        for row in sequences_of(rows)
    ]


def _part(row: Row, start: int, end: int) -> Row:
    return {name: row[name][start:end] for name in ("input_ids", "labels")}


def samples_sha256(rows: Sequence[Row]) -> str:
    """Return the SHA-256 of the tokens and labels of rows, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        parts = [
            [int(value) for value in row[name]]
            for name in ("input_ids", "labels", "seq_lengths")
            if name in row
        ]
        digest.update(json.dumps([*parts, int(row.get("label", -1))]).encode())
    return digest.hexdigest()


def heldout_loss(
    model: Any, rows: Sequence[Row], pad_token_id: int, batch_size: int, label: str = "loss"
) -> tuple[Any, Any]:
    """Return the loss of a causal language model, live or reloaded, on `rows`.

    Logits are computed only at positions where a sample of the batch has a label, and converted to float32 in
    blocks. Under ZeRO-3 every rank must call it with the same rows.

    Returns:
        The negative log-likelihood of each row, summed over its tokens with a label, in nats (float64, shape
        (rows,)), and the number of those tokens (int64, shape (rows,)). The first token of a row is not
        predicted and not scored.
    """
    import numpy
    import torch

    rows = list(rows)
    nll, tokens = numpy.zeros(len(rows)), numpy.zeros(len(rows), dtype=numpy.int64)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]["input_ids"]))
    device = next(model.parameters()).device
    slices = "logits_to_keep" in inspect.signature(innermost(model).forward).parameters
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), tqdm(total=len(rows), desc=label, unit=" samples", delay=2) as bar:
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                input_ids = padded([rows[index]["input_ids"] for index in batch], pad_token_id).to(device)
                mask = padded([[1] * len(rows[index]["input_ids"]) for index in batch], 0).to(device)
                # Position p predicts token p + 1.
                targets = padded([rows[index]["labels"] for index in batch], IGNORED).to(device)[:, 1:]
                positions = (targets != IGNORED).any(dim=0).nonzero().flatten()
                bar.update(len(batch))
                if not len(positions):
                    continue
                # Numbers, not a tensor: the hidden states that they index may be on another GPU than the
                # tokens.
                keep = {"logits_to_keep": positions.tolist()} if slices else {}
                logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False, **keep).logits
                if not slices:
                    logits = logits[:, positions]
                targets = targets[:, positions].to(logits.device)
                labelled = targets != IGNORED
                # Row by row, without a copy if all positions are scored: a copy is as large as the logits.
                by_row = [
                    _cross_entropy(row if wanted.all() else row[wanted], target[wanted])
                    for row, target, wanted in zip(logits, targets, labelled, strict=True)
                ]
                # Not beside those of the next batch: they are the largest tensors of an evaluation.
                del logits
                losses = torch.cat(by_row).double().cpu().numpy()
                owner = labelled.nonzero()[:, 0].cpu().numpy()
                nll[batch] = numpy.bincount(owner, weights=losses, minlength=len(batch))
                tokens[batch] = numpy.bincount(owner, minlength=len(batch))
    finally:
        model.train(was_training)
    return nll, tokens


def finite_loss(
    model: Any, rows: Sequence[Row], pad_token_id: int, batch_size: int, label: str
) -> tuple[Any, Any]:
    """Return the `heldout_loss` of the model that `label` names.

    Raises:
        ExportError: a loss is not finite.
    """
    import numpy

    nll, tokens = heldout_loss(model, rows, pad_token_id, batch_size, f"{label}: loss")
    if bad := numpy.flatnonzero(~numpy.isfinite(nll)).tolist():
        raise ExportError(
            f"{label}: the loss of held-out sample {bad[0]} is {nll[bad[0]]} ({len(bad)} of {len(nll)} are "
            "not finite): its weights have diverged, or overflow in model.dtype; lower "
            "training.learning_rate, or use bfloat16"
        )
    return nll, tokens


def bootstrap(
    nll: Any, tokens: Any, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[list[float], list[float], list[float]]:
    """Return the loss per token of each column of `nll` (samples, models), with a 95 % percentile interval.

    Complete samples are drawn with replacement (tokens of one sample are not independent), the same for all
    columns, so that a column of differences is paired. Efron & Tibshirani, An Introduction to the Bootstrap
    (1993), chapter 13. Intervals of fewer than about 20 samples are known to be too narrow; the interval of a
    single sample is unbounded.

    Returns:
        Point estimates, lower and upper ends, in nats per token, one for each column.
    """
    import numpy

    scored = tokens > 0
    nll, tokens = nll[scored], tokens[scored]
    points = nll.sum(axis=0) / tokens.sum()
    if len(tokens) < 2:
        unknown = [sys.float_info.max] * len(points)
        return points.tolist(), [-end for end in unknown], unknown
    low, high = numpy.percentile(resampled(nll, tokens, resamples, seed), [2.5, 97.5], axis=0)
    return points.tolist(), low.tolist(), high.tolist()


def resampled(sums: Any, weights: Any, resamples: int = RESAMPLES, seed: int = 0) -> Any:
    """Return the mean of each column of `sums` (samples, models) by `weights` in each resample, (resamples,
    models).

    The samples that are drawn follow from their number and the seed alone.
    """
    import numpy

    samples = len(weights)
    draw = numpy.random.default_rng(seed)
    means: list[Any] = []
    block = max(1, 2**22 // samples)
    for start in range(0, resamples, block):
        # Counts of each sample, not indices: a resampled sum is then a matrix product.
        counts = draw.multinomial(samples, [1 / samples] * samples, size=min(block, resamples - start))
        means.append(counts @ sums / (counts @ weights)[:, None])
    return numpy.concatenate(means)


def padded(rows: list[list[int]], value: int, left: bool = False) -> Any:
    """Return rows of tokens as one tensor (rows, longest), padded with `value` on the right, or on the
    left."""
    import torch

    width = max(len(row) for row in rows)
    return torch.tensor(
        [[value] * (width - len(row)) + row if left else row + [value] * (width - len(row)) for row in rows]
    )


def _cross_entropy(logits: Any, targets: Any) -> Any:
    """Return the cross entropy of each token in float32; `logits` are (tokens, vocabulary)."""
    import torch
    from torch.nn.functional import cross_entropy

    if not len(targets):
        return logits.new_zeros(0, dtype=torch.float32)
    blocks = zip(logits.split(_LOGIT_ROWS), targets.split(_LOGIT_ROWS), strict=True)
    return torch.cat([cross_entropy(part.float(), target, reduction="none") for part, target in blocks])


def innermost(model: Any) -> Any:
    """Return the transformers model inside DDP or DeepSpeed's engine and PEFT."""
    while hasattr(model, "module"):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model
