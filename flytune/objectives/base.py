"""The interface of an objective: TRL's trainer and its arguments, the batches, and the score of held-out rows."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from flytune.models import Row
from flytune.recipe import Recipe

ReferenceKind = Literal["none", "adapter", "copy", "precomputed"]
"""Reference model that a step also runs. none: there is none; adapter: the model with its adapter switched off; copy: a second,
frozen model; precomputed: none, the rows have its log-probabilities."""


class ObjectiveBase:
    """One goal of training. Subclasses contain only what differs."""

    name: ClassVar[str]
    """Value of `objective` in recipes."""
    sequences_per_row: ClassVar[int] = 1
    """Sequences that a row of the data brings into a forward pass."""

    def problems(self, recipe: Recipe) -> list[str]:
        """List what no shape solves: parts of the recipe that cannot work with it, with the reason, a line each."""
        return []

    def reference(self, recipe: Recipe) -> ReferenceKind:
        """Return the reference model of each step."""
        return "none"

    def switches_dropout_off(self, recipe: Recipe) -> bool:
        """Return whether dropout, the adapter's too, is off in training."""
        return False

    def reasons(self, recipe: Recipe) -> list[str]:
        """List what the plan says about its cost, a line each."""
        return []

    def arguments_class(self) -> Any:
        """Return TRL's class of training arguments."""
        raise NotImplementedError

    def arguments(self, recipe: Recipe) -> dict[str, Any]:
        """Return its own keyword arguments of that class."""
        raise NotImplementedError

    def trainer_class(self) -> Any:
        """Return TRL's trainer, for rows that are prepared."""
        raise NotImplementedError

    def trainer_arguments(self, recipe: Recipe, load: Callable[[], Any]) -> dict[str, Any]:
        """Return its own keyword arguments of the trainer; `load` returns another copy of the base model."""
        return {}

    def collator(self, pad_token_id: int) -> Callable[[list[Row]], dict[str, Any]] | None:
        """Return the maker of its batches; None for flytune.data.Collator."""
        return None

    def measure(self, trainer: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
        """Return the live model's loss on each row times the row's weight, and the weight: arrays of shape (rows,).

        All processes call it with equally many rows.
        """
        raise NotImplementedError
