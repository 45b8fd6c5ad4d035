"""A frozen model that runs before training, and its results on the prepared rows, as reference.py stores
them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from flytune.models import BaseRequest, Row
from flytune.recipe import Recipe

SPLITS = ("train", "heldout")


class FrozenModel:
    """The frozen model of one recipe. Subclasses say which model it is, and what its results are."""

    results: ClassVar[str]
    """Phrase of its results in errors."""
    again: ClassVar[str] = "compute them again (reference_log_probs)"
    """Remedy where they are missing or wrong."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def requested(self, base: BaseRequest) -> tuple[Recipe, BaseRequest]:
        """Return the recipe of its own task, whose base it is, and the request of that base's files.

        Args:
            base: the request of the base model that is trained.
        """
        raise NotImplementedError

    def key_parts(self) -> tuple[str, ...]:
        """Return everything in the recipe that its results follow from, beside the rows."""
        raise NotImplementedError

    def commit(self) -> str | None:
        """Return its commit on the hub, where its record has one."""
        return None

    def identity(self) -> str:
        """Return its identity, where a run that resumes compares it."""
        return ""

    def compute(self, dataset: Path, out: Path) -> list[Path]:
        """Write its results on all rows of a prepared data set into the folder `out`, which exists; return
        the files."""
        raise NotImplementedError

    def beside(self, rows: Any, folder: Path) -> Any:
        """Return the training rows, a `datasets.Dataset`, with its results in a folder."""
        raise NotImplementedError

    def beside_heldout(self, rows: Sequence[Row], folder: Path) -> list[Row]:
        """Return the first held-out rows with its results in a folder."""
        raise NotImplementedError
