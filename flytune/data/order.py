"""The order of samples in training, which depends on seed, epoch and index alone, not on the number of
processes.

A run is one stream of rows: epoch after epoch, each with all rows once, in an order of its own. Optimizer
step s trains the global_batch_size rows from position s x global_batch_size on, on any ranks. Steps cross the
boundaries of epochs, so that each step is complete: a last step of few samples would move the weights as far
as a full one (Adam's update has the size of the learning rate, whatever the gradient's), and some ranks would
have no sample. Only the run's last step is completed with rows of the next epoch.
"""

import logging
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from flytune.data.rows import ROW_KINDS, RowKind
from flytune.recipe import Training
from flytune.row_names import ANSWERS

log = logging.getLogger(__name__)


PLACE = "place"
"""Key of a row's place in its step, where answers are drawn."""


def steps_of(training: Training, rows: int, repeats: int = 1) -> int:
    """Return the optimizer steps of a run over `rows` samples (or blocks): max_steps, or those of
    num_train_epochs.

    Args:
        repeats: samples that a step has of each row.
    """
    # A fraction of the decimal text: as a float, 0.1 is slightly larger, and would add a step where it
    # divides evenly.
    samples = Fraction(str(training.num_train_epochs)) * rows * repeats
    return training.max_steps or math.ceil(samples / training.global_batch_size)


def permutation(seed: int, epoch: int, rows: int) -> Any:
    """Return all numbers below `rows` in the order of one epoch: uint32 [rows].

    They are sorted by Philox's raw output, which numpy guarantees not to change (NEP 19), unlike that of its
    shuffle.
    """
    import numpy

    keys = numpy.random.Philox(numpy.random.SeedSequence([seed, epoch])).random_raw(rows)
    return numpy.argsort(keys, kind="stable").astype(numpy.uint32)


class Stream:
    """All rows that a run trains, in order, as one data set: the Trainer's train_dataset.

    Micro batches are then consecutive rows, assigned to the ranks in turn (accelerate's BatchSamplerShard):
    the micro batches of a step are the step's rows, whatever their size and number. It keeps the numbers of
    one epoch's rows, 4 bytes each.
    """

    def __init__(
        self,
        dataset: Any,
        training: Training,
        kind: RowKind = ROW_KINDS[ANSWERS],
        repeats: int = 1,
        has_places: bool = False,
    ) -> None:
        """Make the stream of all rows of `dataset`, which are of one kind, or packed blocks.

        Args:
            repeats: number of times that a row follows itself in its step; it divides the global batch.
            has_places: rows have their place in their step (PLACE).
        """
        self._dataset, self._seed, self._positions = dataset, training.seed, training.global_batch_size
        self._has_places = has_places
        self._repeats, self._batch = repeats, training.global_batch_size // repeats
        self.steps = steps_of(training, len(dataset), repeats)
        self._first: Any = None
        """Rows that step 1 trains, if training.probe_longest is set."""
        if training.probe_longest and (lengths := kind.longest(dataset)) is not None:
            import numpy

            # Only their lengths are read; the longest comes first.
            longest = numpy.argsort(-lengths, kind="stable")[: self._batch]
            self._first = longest.astype(numpy.uint32)
        self.joined: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = None
        """Makes what is trained of a row and the row before it in its step; that of a step's first row is the
        last."""
        self.left_out: Sequence[int] = ()
        """Numbers (from 0, ascending) of the batches that no step trains."""
        self._copies = self._micro_batch = 1
        self._epoch, self._order = -1, None
        if self._batch > len(dataset):
            log.warning(
                "training.global_batch_size: %d, but there are %d samples: a step repeats some, the run "
                "trains %.1f epochs",
                self._batch,
                len(dataset),
                self.steps * self._batch / len(dataset),
            )

    def share(self, copies: int, micro_batch: int) -> None:
        """Yield each micro batch to `copies` processes in turn, which share its samples."""
        self._copies, self._micro_batch = copies, micro_batch

    def __len__(self) -> int:
        return self.steps * self._positions * self._copies

    def __getitem__(self, position: int) -> dict[str, Any]:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._dataset.__getitems__(
            [self.row_at(position) for position in positions]
        )
        if self._repeats > 1 or self._has_places:
            return [
                row | {PLACE: position % self._positions}
                for row, position in zip(rows, positions, strict=True)
            ]
        if self.joined is None:
            return rows
        steps = [position - position % self._batch for position in positions]
        places = [
            step + (place - step - 1) % self._batch for step, place in zip(steps, positions, strict=True)
        ]
        before = self._dataset.__getitems__([self.row_at(place) for place in places])
        return [self.joined(*both) for both in zip(rows, before, strict=True)]

    def first_tokens(self, count: int) -> list[int]:
        """Return the first tokens, at most `count`, of the data set's first row."""
        return list(self._dataset[0]["input_ids"][:count])

    def row_at(self, position: int) -> int:
        """Return the row of the data set at a position of the stream."""
        step, place = divmod(position, self._positions * self._copies)
        micro_batch, place = divmod(place, self._micro_batch * self._copies)
        offset = (micro_batch * self._micro_batch + place % self._micro_batch) // self._repeats
        epoch, index = divmod(self.batch_of(step) * self._batch + offset, len(self._dataset))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self._seed, epoch, len(self._dataset))
            if epoch == 0 and self._first is not None:
                _swap_to_front(self._order, self._first)
        return int(self._order[index])  # type: ignore[index]

    def batch_of(self, step: int) -> int:
        """Return the number of the batch that the step after `step` others trains: `step`, plus the batches
        skipped before."""
        for skipped in self.left_out:
            if skipped > step:
                break
            step += 1
        return step

    def epochs_after(self, step: int) -> float:
        """Return the epochs that are done after `step` optimizer steps."""
        return self._samples_after(step) / len(self._dataset)

    def ends_epoch(self, step: int) -> bool:
        """Return whether an epoch is done after `step` optimizer steps that was not after one step less."""
        rows = len(self._dataset)
        before = self._samples_after(step - 1) if step > 1 else 0
        return self._samples_after(step) // rows > before // rows

    def _samples_after(self, step: int) -> int:
        return (self.batch_of(step - 1) + 1) * self._batch


def _swap_to_front(order: Any, first: Any) -> None:
    """Swap the rows `first` with those at the front; all others keep their positions."""
    import numpy

    elsewhere = numpy.flatnonzero(numpy.isin(order, first))
    elsewhere = elsewhere[elsewhere >= len(first)]
    front = order[: len(first)]
    order[elsewhere] = front[~numpy.isin(front, first)]
    order[: len(first)] = first


def callback(stream: Stream) -> Any:
    """Return a Trainer callback that sets the epoch: for the Trainer, the whole stream is one epoch."""
    from transformers import TrainerCallback

    class Epochs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.epoch = stream.epochs_after(state.global_step)

    return Epochs()
