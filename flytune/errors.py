"""The errors a user can meet. Every message names what is wrong, where it stands, and what to do.

    FlytuneError
    ├── RecipeError      reading a recipe or shapes.yaml, on the laptop
    ├── DataError        prepare, on a CPU: which file, which line, how many more
    ├── DoesNotFit       plan: a line a shape, and the cheapest change that would fit
    ├── TrainingError    train: what happened, on which rank, whether the run goes on by itself
    │   └── StorageError checkpoints: the storage is away, full, or refuses
    └── ExportError      gate: which tensor, what was expected, what was found; nothing is stored

They take one string, so that they cross process borders (torchrun pickles what a worker raises).
None is a ValueError: pydantic would wrap it into a ValidationError and hide the message.
"""

from collections.abc import Sequence


class FlytuneError(Exception):
    """Base of all errors that are the user's to mend."""


class RecipeError(FlytuneError):
    """A recipe that cannot be read or cannot work."""

    @classmethod
    def of(cls, where: str, problems: Sequence[str]) -> "RecipeError":
        """One error that lists all `problems` found in `where`, a line each."""
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        return cls("\n".join([f"{where}: {count}", *(f"  {problem}" for problem in problems)]))


class DataError(FlytuneError):
    """Data that cannot be trained on as the recipe asks."""


class DoesNotFit(FlytuneError):
    """No hardware shape can hold the run."""


class TrainingError(FlytuneError):
    """A training run that failed."""


class StorageError(TrainingError):
    """A storage that does not take checkpoints, or does not give them back."""


class ExportError(FlytuneError):
    """Exported weights that are not the ones trained; nothing was stored."""
