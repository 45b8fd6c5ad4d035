"""Held-out samples and their loss, for training (the live model) and evaluation (the exported model)."""

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from tqdm import tqdm

from flytune.errors import ExportError
from flytune.models import images
from flytune.recipe import Recipe

IGNORED = -100
"""Label of a token that is not part of the loss."""
CLASSES = "classes"
"""Key of a row with the places of its labels."""
GATE_SAMPLES = 8
"""Held-out samples that the live model is scored on before export; the evaluation compares the export with
them."""
TILE = 1024
"""Positions whose logits are there at a time: in float32, 512 MB for a vocabulary of 128k."""
RESAMPLES = 2000
"""Number of resamples of the bootstrap."""

Row = dict[str, Any]
"""Sample with input_ids and labels, lists of equal length; a pair also has seq_lengths, the lengths of its
two sequences, and a query those of its own and its documents, a labelled answer label, 1 or 0, and a text
with labels classes, their places."""


def sequences_of(rows: Sequence[Row]) -> list[Row]:
    """Return the sequences of all rows: of rows of several first the first one of each (the chosen one of a
    pair, the query), then the second ones ...; of labelled answers the desirable ones first; else the
    rows."""
    if rows and "label" in rows[0]:
        return sorted(rows, key=lambda row: -row["label"])
    if not rows or "seq_lengths" not in rows[0]:
        return list(rows)
    ends = [[0, *accumulate(row["seq_lengths"])] for row in rows]
    return [
        _part(row, of_row[place], of_row[place + 1])
        for place in range(len(rows[0]["seq_lengths"]))
        for row, of_row in zip(rows, ends, strict=True)
    ]


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
            for name in ("input_ids", "labels", "seq_lengths", CLASSES)
            if name in row
        ]
        digest.update(json.dumps([*parts, int(row.get("label", -1))]).encode())
        digest.update(row.get(images.COLUMN, "").encode())
    return digest.hexdigest()


def uses_fused_head(recipe: Recipe) -> bool:
    """Return whether the live model's held-out loss comes from the head of its training's loss: where samples
    may be longer than TILE, and that head divides by no temperature."""
    return recipe.data.max_length > TILE and getattr(recipe.objective, "temperature", 1.0) == 1.0


def heldout_loss(
    model: Any,
    rows: Sequence[Row],
    pad_token_id: int,
    batch_size: int,
    label: str = "loss",
    fused_head: bool = False,
    sequence: Any = None,
) -> tuple[Any, Any]:
    """Return the loss of a causal language model, live or reloaded, on `rows`.

    Logits are computed only at positions where a sample of the batch has a label, TILE of them at a time.
    Under ZeRO-3 and FSDP every rank must call it with equally many rows.

    Args:
        fused_head: compute them with the head of the training's loss (own_logits.add_head), which the live
            model has and which is never there completely either; every rank must say the same.
        sequence: SequenceGroup whose processes share each row; what is returned is then this process's part
            of the sums.

    Returns:
        The negative log-likelihood of each row, summed over its tokens with a label, in nats (float64, shape
        (rows,)), and the number of those tokens (int64, shape (rows,)). The first token of a row is not
        predicted and not scored.
    """
    import numpy

    rows = list(rows)
    nll, tokens = numpy.zeros(len(rows)), numpy.zeros(len(rows), dtype=numpy.int64)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]["input_ids"]))
    device = next(model.parameters()).device
    log_probs_of = _of_training if fused_head else _of_own_head
    with evaluating(model), tqdm(total=len(rows), desc=label, unit=" samples", delay=2) as bar:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            multiple = sequence.part.parts if sequence else 1
            inputs = {
                "input_ids": padded(
                    [rows[index]["input_ids"] for index in batch], pad_token_id, multiple=multiple
                ),
                "attention_mask": padded(
                    [[1] * len(rows[index]["input_ids"]) for index in batch], 0, multiple=multiple
                ),
            }
            inputs |= images.inputs_of([rows[index] for index in batch], inputs["input_ids"])
            inputs = {name: values.to(device) for name, values in inputs.items()}
            labels = padded([rows[index]["labels"] for index in batch], IGNORED, multiple=multiple)
            labels = labels.to(device)
            bar.update(len(batch))
            scored = labels[:, 1:] != IGNORED
            if not scored.any():
                continue
            inputs["use_cache"] = False
            if sequence:
                log_probs, scored = sequence.log_probs(model, inputs | {"labels": labels})
            else:
                log_probs = log_probs_of(model, inputs, labels)
            nll[batch] = -log_probs.double().sum(dim=1).cpu().numpy()
            tokens[batch] = scored.sum(dim=1).cpu().numpy()
    return nll, tokens


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Compute without gradients and dropout in the block; the training mode is restored afterwards."""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _of_training(model: Any, inputs: dict[str, Any], labels: Any) -> Any:
    """Return the log-probability of each token but the first of a row, float32 of shape (rows, length - 1),
    0 without a label, from the head of the training's loss."""
    return model(**inputs, labels=labels, fused_lm_head=True).log_probs


def _of_own_head(model: Any, inputs: dict[str, Any], labels: Any) -> Any:
    """Return the same from the model's own logits."""
    import torch

    # Position p predicts token p + 1.
    targets = labels[:, 1:]
    positions = (targets != IGNORED).any(dim=0).nonzero().flatten()
    log_probs = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
    for tile, logits in tiles_of_logits(model, inputs, positions):
        wanted = targets[:, tile]
        # Row by row, without a copy if all positions are scored: a copy is as large as the logits.
        for row, (row_logits, target) in enumerate(zip(logits, wanted.to(logits.device), strict=True)):
            is_scored = target != IGNORED
            chosen = row_logits if is_scored.all() else row_logits[is_scored]
            losses = _cross_entropy(chosen, target[is_scored])
            log_probs[row, tile[is_scored.to(tile.device)]] = -losses.to(log_probs.device)
        # Not beside those of the next tile: they are the largest tensors of an evaluation.
        del logits, row_logits, chosen
    return log_probs


def tiles_of_logits(model: Any, inputs: dict[str, Any], positions: Any) -> Iterator[tuple[Any, Any]]:
    """Yield positions, and their logits of shape (rows, positions, vocabulary), from one pass through the
    layers.

    A model that computes the logits of all positions at once gives them at once.
    """
    inner = innermost(model)
    # Numbers, not a tensor: the hidden states that they index may be on another GPU than the tokens.
    if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        logits = model(**inputs).logits
        yield positions, logits[:, positions.to(logits.device)]
    elif getattr(inner, "base_model", inner) is inner:
        yield positions, model(**inputs, logits_to_keep=positions.tolist()).logits
    else:
        # Of some types the model calls the decoder in its base model itself.
        with _layers_run_once(inner.base_model.get_decoder()):
            for tile in positions.split(max(1, TILE // len(inputs["input_ids"]))):
                yield tile, model(**inputs, logits_to_keep=tile.tolist()).logits


@contextmanager
def _layers_run_once(layers: Any) -> Iterator[None]:
    """Let a model's layers, without its head, return their first result again within the block."""
    original, is_own = layers.forward, "forward" in vars(layers)
    results: list[Any] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not results:
            results.append(original(*args, **kwargs))
        return results[0]

    layers.forward = forward
    try:
        yield
    finally:
        if is_own:
            layers.forward = original
        else:
            del layers.forward


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


def padded(rows: list[list[int]], value: int, left: bool = False, multiple: int = 1) -> Any:
    """Return rows of tokens as one tensor (rows, longest), padded with `value` on the right, or on the left,
    to a multiple of a length."""
    import torch

    longest = max(len(row) for row in rows)
    width = longest + -longest % multiple
    return torch.tensor(
        [[value] * (width - len(row)) + row if left else row + [value] * (width - len(row)) for row in rows]
    )


def _cross_entropy(logits: Any, targets: Any) -> Any:
    """Return the cross entropy of each token in float32; `logits` are (tokens, vocabulary)."""
    import torch
    from torch.nn.functional import cross_entropy

    if not len(targets):
        return logits.new_zeros(0, dtype=torch.float32)
    blocks = zip(logits.split(TILE), targets.split(TILE), strict=True)
    return torch.cat([cross_entropy(part.float(), target, reduction="none") for part, target in blocks])


def innermost(model: Any) -> Any:
    """Return the transformers model inside DDP or DeepSpeed's engine and PEFT."""
    while hasattr(model, "module"):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model
