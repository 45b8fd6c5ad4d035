"""The order of samples in training, which depends on seed, epoch and index alone, not on the number of processes.

A run is one stream of rows: epoch after epoch, each with all rows once, in an order of its own. Optimizer step s trains the
global_batch_size rows from position s x global_batch_size on, on any ranks. Steps cross the boundaries of epochs, so that each
step is complete: a last step of few samples would move the weights as far as a full one (Adam's update has the size of the
learning rate, whatever the gradient's), and some ranks would have no sample. Only the run's last step is completed with rows
of the next epoch.
"""

import logging
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from flytune.recipe import Training

log = logging.getLogger(__name__)


def steps_of(training: Training, rows: int) -> int:
    """Return the optimizer steps of a run over `rows` samples (or blocks): max_steps, or those of num_train_epochs."""
    # A fraction of the decimal text: as a float, 0.1 is slightly larger, and would add a step where it divides evenly.
    samples = Fraction(str(training.num_train_epochs)) * rows
    return training.max_steps or math.ceil(samples / training.global_batch_size)


def permutation(seed: int, epoch: int, rows: int) -> Any:
    """Return all numbers below `rows` in the order of one epoch: uint32 [rows].

    They are sorted by Philox's raw output, which numpy guarantees not to change (NEP 19), unlike that of its shuffle.
    """
    import numpy

    keys = numpy.random.Philox(numpy.random.SeedSequence([seed, epoch])).random_raw(rows)
    return numpy.argsort(keys, kind="stable").astype(numpy.uint32)


class Stream:
    """All rows that a run trains, in order, as one data set: the Trainer's train_dataset.

    Micro batches are then consecutive rows, assigned to the ranks in turn (accelerate's BatchSamplerShard): the micro batches
    of a step are the step's rows, whatever their size and number. It keeps the numbers of one epoch's rows, 4 bytes each.
    """

    def __init__(self, dataset: Any, training: Training, pairs: bool = False) -> None:
        """Make the stream of all rows of `dataset`; `pairs` says that a row is a pair of sequences, and not a packed block."""
        self._dataset, self._seed, self._batch = dataset, training.seed, training.global_batch_size
        self.steps = steps_of(training, len(dataset))
        self._first: Any = None
        """Rows that step 1 trains, if training.probe_longest is set."""
        if training.probe_longest and (pairs or "seq_lengths" not in dataset.column_names):
            self._first = _longest(dataset, min(self._batch, len(dataset)), pairs)
        self.joined: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = None
        """Makes what is trained of a row and the row before it in its step; that of a step's first row is the last."""
        self.left_out: Sequence[int] = ()
        """Numbers (from 0, ascending) of the batches that no step trains."""
        self._epoch, self._order = -1, None
        if self._batch > len(dataset):
            log.warning(
                "training.global_batch_size: %d, but there are %d samples: a step repeats some, the run trains %.1f epochs",
                self._batch,
                len(dataset),
                self.steps * self._batch / len(dataset),
            )

    def __len__(self) -> int:
        return self.steps * self._batch

    def __getitem__(self, position: int) -> dict[str, Any]:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._dataset.__getitems__([self.row_at(position) for position in positions])
        if self.joined is None:
            return rows
        steps = [position - position % self._batch for position in positions]
        places = [step + (place - step - 1) % self._batch for step, place in zip(steps, positions, strict=True)]
        before = self._dataset.__getitems__([self.row_at(place) for place in places])
        return [self.joined(*both) for both in zip(rows, before, strict=True)]

    def row_at(self, position: int) -> int:
        """Return the row of the data set at a position of the stream."""
        step, offset = divmod(position, self._batch)
        epoch, index = divmod(self.batch_of(step) * self._batch + offset, len(self._dataset))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self._seed, epoch, len(self._dataset))
            if epoch == 0 and self._first is not None:
                _swap_to_front(self._order, self._first)
        return int(self._order[index])  # type: ignore[index]

    def batch_of(self, step: int) -> int:
        """Return the number of the batch that the step after `step` others trains: `step`, plus the batches skipped before."""
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


def _longest(dataset: Any, count: int, pairs: bool) -> Any:
    """Return the numbers of the `count` longest rows, longest first; only their lengths are read. A pair has its longer one."""
    import numpy
    from pyarrow import compute

    lengths = compute.list_value_length(dataset.data.column("input_ids")).to_numpy()
    if pairs:
        lengths = numpy.asarray([max(both) for both in dataset.data.column("seq_lengths").to_pylist()])
    return numpy.argsort(-lengths, kind="stable")[:count].astype(numpy.uint32)


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
