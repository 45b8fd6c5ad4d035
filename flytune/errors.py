"""Errors for users. Every message names what is wrong, where it is, and what to do.

    FlytuneError ├── RecipeError      reading a recipe or shapes.yaml, on the laptop ├── DataError
    prepare, on a CPU: which file, which line, how many more ├── DoesNotFit       plan: one line per shape,
    and the cheapest change that would fit ├── TrainingError    train: what happened, on which rank, whether
    another attempt follows │   ├── DeviceError  a GPU row's pod: which row, what torch sees instead, driver,
    CUDA; in train, evaluate and infer │   ├── StorageError checkpoints and records: the storage is away,
    full, or refuses │   ├── OutOfMemory  GPU memory: the same global batch with a smaller micro batch │   ├──
    Preempted    the machine is reclaimed: which step was saved │   ├── KilledAgain  the pod was killed twice
    in the same phase: which, at how much memory, and what was planned │   ├── Hang         no step finished
    for too long: the stack of each rank │   ├── BadLoss      a NaN loss or a loss spike: which step, and
    which batches are skipped │   └── EngineError  vLLM, which draws answers, is away: the end of its log ├──
    ExportError      gate: which tensor, what was expected, what was found; nothing is stored ├── ServingError
    a server of models: which one, and what it did not answer └── AcceptedError    history of accepted models:
    which one is accepted by now, or why it cannot be read

Each takes one string, so that it can be pickled: torchrun pickles the errors of its workers.
None is a ValueError: pydantic would wrap that into a ValidationError and hide the message.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from flytune import addresses
from flytune.sentences import counted

_LONGEST = 15_000
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, those that turn the direction of text around, and halves of
surrogate pairs."""


def printable(text: str) -> str:
    """Return a text that no terminal obeys: unprintable characters as escapes, and without its middle if it
    is very long.

    Names of files, rows and answers of servers are in messages, and a half of a surrogate pair could not even
    be printed.
    """
    if len(text) > _LONGEST:
        text = (
            f"{text[: _LONGEST // 2]} [... {len(text) - _LONGEST:,} characters left out ...] "
            f"{text[-_LONGEST // 2 :]}"
        )
    return escaped(text)


def escaped(text: str) -> str:
    """Return a complete text that no terminal obeys: unprintable characters as escapes."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def chain(
    error: BaseException | None, contexts: Literal["all", "shown", "none"] = "all"
) -> Iterator[BaseException]:
    """Yield an error, and those that it comes from, each once: an error that is raised from itself is its own
    cause.

    Args:
        error: the first one.
        contexts: whether errors are followed in whose handling another one was raised: all, those of a
            traceback, or none.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        is_followed = contexts == "all" or (contexts == "shown" and not error.__suppress_context__)
        error = error.__cause__ or (error.__context__ if is_followed else None)


class FlytuneError(Exception):
    """Base of all errors that the user can fix. No message has a credential, whatever it was made of, and all
    are printable."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(addresses.redact(str(message))))


class LaunchError(FlytuneError):
    """Command that another launcher has started several times."""


class RecipeError(FlytuneError):
    """Recipe that cannot be read or cannot work."""

    @classmethod
    def of(cls, where: str, problems: Sequence[str]) -> "RecipeError":
        """Return one error that lists all `problems` of `where`, one per line."""
        count = counted(len(problems), "mistake")
        return cls("\n".join([f"{where}: {count}", *(f"  {problem}" for problem in problems)]))


class DataError(FlytuneError):
    """Data that cannot be used as the recipe says."""


class PreparedDataError(DataError):
    """Prepared data that is not, or not completely, what was written."""


class RewardError(FlytuneError):
    """Reward that raises, hangs, returns no number, or does not tell an answer from nothing."""


class DoesNotFit(FlytuneError):
    """No hardware shape can hold the run."""


class TrainingError(FlytuneError):
    """Failed training run."""

    def __init__(self, message: str, goes_on: bool = False) -> None:
        super().__init__(message)
        self.goes_on = goes_on
        """True if another attempt can succeed, because a checkpoint or a note was saved for it."""


class DeviceError(TrainingError):
    """GPUs that differ from the row of shapes.yaml."""


class OutOfMemory(TrainingError):
    """Step that does not fit into GPU memory."""


class Preempted(TrainingError):
    """Preemption of the machine."""


class KilledAgain(TrainingError):
    """Pod that was killed twice in the same phase, and would be killed again."""


class Hang(TrainingError):
    """Training that finished no step for too long."""


class BadLoss(TrainingError):
    """NaN loss, or a loss spike."""


class EngineError(TrainingError):
    """Engine beside the trainer that does not start, has ended, or does not answer; another attempt starts
    it anew."""


class StorageError(TrainingError):
    """Storage that is unavailable, full, or denies access."""


class StorageFull(StorageError):
    """Storage that has no room."""


class StorageRefused(StorageError):
    """Storage that denies access, or is not there."""


class ExportError(FlytuneError):
    """Exported weights that differ from the trained ones; nothing was stored."""


class ServingError(FlytuneError):
    """Server that cannot be asked, or that does not answer as its API says."""


class AcceptedError(FlytuneError):
    """Decision on the accepted model that cannot be recorded or rolled back."""
