"""Plans of a run whose data is prepared: the batches that the order of training draws, instead of rows of
data.max_length."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flytune import data
from flytune.errors import DataError, RecipeError
from flytune.hardware import Shape, load_shapes
from flytune.objectives import objective_of
from flytune.planning import planner, workloads
from flytune.planning.candidates import Fit
from flytune.recipe import Recipe, Training
from flytune.records import Plan
from flytune.sentences import counted
from training_estimates import model_states
from training_estimates.sizes import Geometry

MOST_POSITIONS = 2_000_000
"""Rows of the run whose order is looked at; further ones are taken to be like them."""


class Lengths(NamedTuple):
    """Tokens of the longest sequence of each stored row, by split."""

    train: Any
    heldout: Any

    @property
    def longest(self) -> int:
        """Tokens of the longest row of both splits."""
        return int(max(self.train.max(), self.heldout.max(initial=0)))


class Padded(NamedTuple):
    """Tokens of a row of the micro batches that a run draws, padded to the longest row of each."""

    largest: int
    mean: float
    """Mean over the steps, of what the process that takes longest has: the others wait for it."""


def lengths(folder: Path, recipe: Recipe) -> Lengths:
    """Return the lengths of a prepared data set.

    Raises:
        DataError: the folder has none, or its files were changed.
        RecipeError: it was prepared for another kind of rows, the model draws its answers itself, or it is
            packed: then every row is as long as planned.
    """
    if objective_of(recipe).draws():
        raise RecipeError(
            f"--data {folder}: the answers of objective: {recipe.objective.name} are drawn by the model, and "
            "their lengths are not in the data; leave --data out, and the plan takes "
            "objective.max_completion_length"
        )
    if not folder.is_dir():
        raise DataError(
            f"--data {folder}: no such folder; name one with prepared data ({data.shards.MANIFEST})"
        )
    manifest, kind = data.shards.read_manifest(folder), data.row_kind(recipe.row_kind)
    if manifest.row_kind != recipe.row_kind:
        raise RecipeError(
            f"--data {folder}: it was prepared for {manifest.row_kind}, and the recipe's objective trains "
            f"{recipe.row_kind}; prepare it for this recipe"
        )
    train, heldout = (
        kind.longest(data.load(folder, split)) if getattr(manifest, split).rows else None for split in _SPLITS
    )
    if train is None or recipe.data.packing:
        raise RecipeError(
            f"--data {folder}: packed rows all have data.max_length tokens, as they are planned; leave "
            "--data out"
        )
    if int(train.max()) > recipe.data.max_length:
        raise DataError(
            f"{folder}: its longest row has {counted(int(train.max()), 'token')}, more than data.max_length "
            f"{recipe.data.max_length:,}; prepare it for this recipe"
        )
    return Lengths(train, train[:0] if heldout is None else heldout)


_SPLITS = ("train", "heldout")


def padded(train: Any, training: Training, fit: Fit) -> Padded:
    """Return the padded lengths of a run's micro batches, as training/trainer.py draws them: consecutive rows
    of the stream, assigned to the processes in turn."""
    import numpy

    work = fit.workload
    micro, accumulation, ranks = work.micro_batch, work.accumulation, work.degrees.data_parallel
    stream = data.Stream(_Rows(train), training)
    batch = micro * accumulation * ranks
    steps = min(stream.steps, max(1, MOST_POSITIONS // batch))
    rows = numpy.fromiter((stream.row_at(position) for position in range(steps * batch)), dtype=numpy.int64)
    widths = train[rows].reshape(steps, accumulation, ranks, micro).max(axis=3)
    # Where parameters are sharded, the processes meet in every layer; otherwise at the end of a step.
    slowest = (
        widths.max(axis=2) if work.layout.shards_parameters else widths.sum(axis=1).max(axis=1) / accumulation
    )
    return Padded(int(widths.max()), float(slowest.mean()))


class _Rows:
    """The lengths of a data set in the place of its rows."""

    column_names: Sequence[str] = ("input_ids",)

    def __init__(self, row_lengths: Any) -> None:
        import pyarrow

        # Only the lengths of the lists are read (RowKind.longest).
        ends = pyarrow.array([0, *row_lengths.cumsum().tolist()], pyarrow.int64())
        values = pyarrow.nulls(int(row_lengths.sum()), pyarrow.int32())
        self.data = pyarrow.table({"input_ids": pyarrow.LargeListArray.from_arrays(ends, values)})

    def __len__(self) -> int:
        return int(self.data.num_rows)


def make(recipe: Recipe, geometry: Geometry, folder: Path, shapes: Sequence[Shape] | None = None) -> Plan:
    """Return the plan of a recipe for a prepared data set: memory of its longest row, hours of the batches
    that it draws.

    Raises:
        RecipeError, DataError, DoesNotFit: as `lengths` and `planner.make` do.
    """
    drawn_lengths = lengths(folder, recipe)
    data = recipe.data.model_copy(update={"max_length": drawn_lengths.longest})
    fit = planner.fit(
        recipe.model_copy(update={"data": data}),
        shapes or load_shapes(),
        geometry,
        samples=len(drawn_lengths.train),
    )
    plan = planner.advised(fit, geometry, len(drawn_lengths.train))
    drawn = padded(drawn_lengths.train, recipe.training, fit)
    share = _time_share(fit, drawn.mean)
    rows = counted(len(drawn_lengths.train) + len(drawn_lengths.heldout), "row")
    longest = (
        f"data in {folder}: the longest of {rows} has {counted(drawn_lengths.longest, 'token')} "
        f"(data.max_length {recipe.data.max_length:,}), and memory is that of a micro batch of such rows; in "
        f"the order of training micro batches are padded to a mean of {drawn.mean:,.0f} tokens a row, "
        f"{drawn.largest:,} at most: a step takes {share:.0%} of the time of one with the longest rows, from "
        "which hours and price follow"
    )
    changed = {
        "key": recipe.model_copy(update={"sharding": fit.recipe.sharding}).key(),
        "hours": [share * hours for hours in plan.hours],
        "intervals": {
            name: interval.times(share) if name in ("hours", "price") else interval
            for name, interval in plan.intervals.items()
        },
        "reasons": [longest, *plan.reasons],
    }
    return plan.model_copy(update=changed)


def _time_share(fit: Fit, mean: float) -> float:
    """Return the time of a step whose rows have the mean length over that of the plan; 1 where time is not
    known."""
    if fit.time is None:
        return 1.0
    work, planned = fit.workload, fit.workload.sequence_length

    def seconds(length: int) -> float:
        other = replace(work, sequence_length=length)
        time = workloads.time_of(other, fit.shape, model_states.of(other))
        assert time is not None
        return time.seconds

    low = max(1, math.floor(mean))
    between = mean - low
    return ((1 - between) * seconds(low) + between * seconds(min(low + 1, planned))) / fit.time.seconds
