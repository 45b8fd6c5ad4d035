"""The errors a user can meet. Every message names what is wrong, where it is, and what to do.

    FlytuneError
    ├── RecipeError      reading a recipe or shapes.yaml, on the laptop
    ├── DataError        prepare, on a CPU: which file, which line, how many more
    ├── DoesNotFit       plan: a line a shape, and the cheapest change that would fit
    ├── TrainingError    train: what happened, on which rank, whether the run goes on by itself
    │   ├── DeviceError  a GPU row's pod: which row, what torch sees instead, driver, CUDA; in train, evaluate and infer
    │   ├── StorageError checkpoints: the storage is away, full, or refuses
    │   ├── OutOfMemory  of a GPU: the same global batch with a smaller micro batch
    │   ├── Preempted    the machine was taken back: which step is kept
    │   ├── KilledAgain  the pod was killed twice in the same phase: which, at how much memory, and what was planned
    │   ├── Hang         no step for too long: where each rank is
    │   └── BadLoss      no number, or too high: which step, and what is left out
    ├── ExportError      gate: which tensor, what was expected, what was found; nothing is stored
    └── AcceptedError    the history of accepted models: what is accepted by now, or why it cannot be read

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

    def __init__(self, message: str, goes_on: bool = False) -> None:
        super().__init__(message)
        self.goes_on = goes_on
        """Whether another attempt will do better: something was saved or noted for it."""


class DeviceError(TrainingError):
    """GPUs that are not what the row of shapes.yaml promises."""


class OutOfMemory(TrainingError):
    """A GPU's memory does not hold the step."""


class Preempted(TrainingError):
    """The machine is being taken back."""


class KilledAgain(TrainingError):
    """A pod that was killed twice in the same phase, and would be once more."""


class Hang(TrainingError):
    """Nothing was finished for too long."""


class BadLoss(TrainingError):
    """A loss that is no number, or jumps."""


class StorageError(TrainingError):
    """A storage that does not take checkpoints, or does not give them back."""


class ExportError(FlytuneError):
    """Exported weights that are not the ones trained; nothing was stored."""


class AcceptedError(FlytuneError):
    """A decision about the accepted model that cannot be recorded, or taken back."""
