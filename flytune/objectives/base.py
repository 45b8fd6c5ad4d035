"""The interface of an objective: TRL's trainer and its arguments, the batches, and the score of held-out rows."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from flytune.models import Row
from flytune.recipe import Recipe

ReferenceKind = Literal["none", "adapter", "copy", "precomputed"]
"""Reference model that a step also runs. none: there is none; adapter: the model with its adapter switched off; copy: a second,
frozen model; precomputed: none, the rows have its log-probabilities."""
FILLER = "filler"
"""Key of a row that `measure` gets only to make as many forward passes as the other processes."""


class ObjectiveBase:
    """One goal of training. Subclasses contain only what differs."""

    name: ClassVar[str]
    """Value of `objective` in recipes."""
    sequences_per_row: ClassVar[int] = 1
    """Sequences that a row of the data brings into a forward pass."""
    can_precompute: ClassVar[bool] = False
    """True if rows can have the log-probabilities of the reference, computed before training."""

    head_outputs: ClassVar[tuple[str, ...]] = ()
    """Results of TRL's chunked loss for each token; none where the model has no head of the vocabulary."""

    def frozen_passes(self, recipe: Recipe) -> int:
        """Return the forward passes of a row without gradients, beside that of training."""
        return int(self.reference(recipe) not in ("none", "precomputed"))

    def frozen_passes_first(self, recipe: Recipe) -> bool:
        """Return whether those passes come before the one of training, and not between its forward and backward pass."""
        return False

    def problems(self, recipe: Recipe) -> list[str]:
        """List what no shape solves: parts of the recipe that cannot work with it, with the reason, a line each."""
        return []

    def model_problem(self, model_type: str) -> str | None:
        """Return why a type of base model cannot be trained for it; None if it can."""
        return None

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

    def joined(self, recipe: Recipe) -> Callable[[Row, Row], Row] | None:
        """Return what makes a row to train of it and the row before it in its step; None if rows are trained as they are."""
        return None

    def measure(self, trainer: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
        """Return the live model's loss on each row times the row's weight, and the weight: arrays of shape (rows,).

        All processes call it with equally many rows.
        """
        raise NotImplementedError
