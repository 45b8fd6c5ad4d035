"""The order of samples: which of them a step trains follows from seed, epoch and index alone, on however many processes.

A run is one stream of rows: epoch after epoch, each with all rows once, in an order of its own. Optimizer step s trains the
rows at places s x global_batch_size and on, whoever computes them. Steps run over the borders of epochs, so that every step is
whole: a last step of few samples would move the weights as far as a full one (Adam's update has the size of the learning rate,
whatever the gradient's), and would have no sample for some ranks. Only the run's last step is filled up, from the next epoch.
"""

import logging
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from flytune.recipe.sections import Training

log = logging.getLogger(__name__)


def steps_of(training: Training, rows: int) -> int:
    """Optimizer steps of a run over `rows` samples (or blocks): max_steps, or as many as num_train_epochs need."""
    # As a fraction of what was written: 0.1 is a little more as a float, and a step more where it divides evenly.
    samples = Fraction(str(training.num_train_epochs)) * rows
    return training.max_steps or math.ceil(samples / training.global_batch_size)


def permutation(seed: int, epoch: int, rows: int) -> Any:
    """All numbers below `rows` in the order of one epoch: uint32 [rows].

    Sorted by Philox's raw output, which numpy promises never to change (NEP 19); it promises no such thing of its shuffle.
    """
    import numpy

    keys = numpy.random.Philox(numpy.random.SeedSequence([seed, epoch])).random_raw(rows)
    return numpy.argsort(keys, kind="stable").astype(numpy.uint32)


class Stream:
    """All that a run trains, in order, as one data set to be read from its first row to its last: the Trainer's train_dataset.

    Micro batches are then consecutive rows, dealt to the ranks in turn (accelerate's BatchSamplerShard): the micro batches of a
    step are the step's rows, whatever their size and number. It holds the numbers of one epoch's rows, 4 bytes each.
    """

    def __init__(self, dataset: Any, training: Training) -> None:
        self._dataset, self._seed, self._batch = dataset, training.seed, training.global_batch_size
        self.steps = steps_of(training, len(dataset))
        self._first: Any = None
        """Rows that step 1 trains, where the recipe asks for the longest."""
        if training.probe_longest and "seq_lengths" not in dataset.column_names:
            self._first = _longest(dataset, min(self._batch, len(dataset)))
        self.left_out: Sequence[int] = ()
        """Turns of the data (a step's samples each, from 0) that no step trains; ascending."""
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

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[int]) -> list[dict[str, list[int]]]:
        rows: list[dict[str, list[int]]] = self._dataset.__getitems__([self.row_at(place) for place in places])
        return rows

    def row_at(self, place: int) -> int:
        """Which row of the data set stands at a place of the stream."""
        step, offset = divmod(place, self._batch)
        epoch, index = divmod(self.turn_of(step) * self._batch + offset, len(self._dataset))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self._seed, epoch, len(self._dataset))
            if epoch == 0 and self._first is not None:
                _swap_to_front(self._order, self._first)
        return int(self._order[index])  # type: ignore[index]

    def turn_of(self, step: int) -> int:
        """Which turn of the data the step after `step` others trains: the same number, but for those left out before."""
        for turn in self.left_out:
            if turn > step:
                break
            step += 1
        return step

    def epochs_after(self, step: int) -> float:
        """How often `step` optimizer steps have gone through the data."""
        return (self.turn_of(step - 1) + 1) * self._batch / len(self._dataset)


def _longest(dataset: Any, count: int) -> Any:
    """The numbers of the longest rows, longest first; reads how long they are, and not what they hold."""
    import numpy
    from pyarrow import compute

    lengths = compute.list_value_length(dataset.data.column("input_ids")).to_numpy()
    return numpy.argsort(-lengths, kind="stable")[:count].astype(numpy.uint32)


def _swap_to_front(order: Any, first: Any) -> None:
    """Puts the rows `first` first; those that stood there take their places, and all others stay where they are."""
    import numpy

    behind = numpy.flatnonzero(numpy.isin(order, first))
    behind = behind[behind >= len(first)]
    front = order[: len(first)]
    order[behind] = front[~numpy.isin(front, first)]
    order[: len(first)] = first


def callback(stream: Stream) -> Any:
    """Tells the Trainer how far a step is in epochs: to it, the stream is one."""
    from transformers import TrainerCallback

    class Epochs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.epoch = stream.epochs_after(state.global_step)

    return Epochs()
