"""Which model is accepted: a history that only grows, and a pointer, at a folder or an fsspec address.

    ADDRESS/history/000001.json   one decision; its number is taken once, and its content never changes
    ADDRESS/accepted.json         the newest decision that moved the pointer, for those who only want to know the model

The history decides: what is accepted follows from it alone, and accepted.json is written behind it, whole or not at all. Two
writers who want the same number cannot both have it: on a file system by a hard link, on S3 and Google Cloud Storage by a PUT
on condition (If-None-Match, ifGenerationMatch). Where a store has no such condition (some that only speak S3's protocol), of
two decisions in the same second one may be lost.
"""

import os
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from flytune.errors import AcceptedError
from flytune.schema import Record, Strict

POINTER, HISTORY = "accepted.json", "history"
TRIES = 8
"""For a number that others took meanwhile."""


class Duel(Strict):
    """Two models on the same held-out tokens; nats a token, paired by sample, with a 95 % interval."""

    against: str
    """The artifact of the champion; `base` where the challenger was held against its own base model."""
    champion: float
    challenger: float
    difference: float
    """challenger - champion; negative is better."""
    difference_low: float
    difference_high: float
    samples: int
    tokens: int

    @property
    def is_won(self) -> bool:
        """Whether the challenger's loss is lower beyond doubt: the whole interval lies below zero."""
        return self.difference_high < 0

    def words(self) -> str:
        """The figures in a line."""
        side = "below" if self.is_won else "above" if self.difference_low > 0 else "on both sides of"
        return (
            f"held-out loss {self.challenger:.4f} against {self.champion:.4f} of "
            f"{'its base' if self.against == 'base' else 'the accepted one'}; the difference {self.difference:+.4f} "
            f"({self.difference_low:+.4f} to {self.difference_high:+.4f}) lies {side} zero, over {self.samples} samples"
        )


class Decision(Record):
    """One entry of the history."""

    number: Annotated[int, Field(ge=1)] = 1
    """Given when it is recorded."""
    time: datetime
    outcome: Literal["accepted", "refused", "rolled back"]
    artifact: str
    """The address of the model that was decided on; of a rollback, the one that is accepted again."""
    method: str
    """full, lora or qlora: whether the artifact is a model or an adapter."""
    base: str = ""
    """The base model that the recipe names, with @ and the revision where it has one."""
    recipe: str
    """The recipe's name and key."""
    fingerprint: str
    """Of the data that it was trained on."""
    duel: Duel | None = None
    reason: str


def history(address: str) -> list[Decision]:
    """All decisions, oldest first; none yet are an empty list.

    Raises:
        AcceptedError: the address cannot be read, or an entry is none.
    """
    filesystem, root = _opened(address)
    try:
        filesystem.invalidate_cache()
        names = sorted(str(name) for name in filesystem.ls(f"{root}/{HISTORY}", detail=False) if str(name).endswith(".json"))
        return [Decision.model_validate_json(filesystem.cat_file(name)) for name in names]
    except FileNotFoundError:
        return []
    except ValidationError as error:
        raise AcceptedError(f"{address}/{HISTORY}: an entry is no decision ({error.error_count()} mistakes): {error}") from None
    except Exception as error:
        raise _away(address, "read", error) from error


def current(decisions: list[Decision]) -> Decision | None:
    """The decision whose model is accepted after all of them; None where none ever was."""
    return next(iter(_standing(decisions)[-1:]), None)


def _standing(decisions: list[Decision]) -> list[Decision]:
    """Those that were accepted and not rolled back: the last is accepted, the one before it comes after a rollback."""
    stack: list[Decision] = []
    for decision in decisions:
        if decision.outcome == "accepted":
            stack.append(decision)
        elif decision.outcome == "rolled back" and stack:
            stack.pop()
    return stack


def record(address: str, decision: Decision, expected: str | None) -> Decision:
    """Adds a decision to the history, and moves the pointer where it says so.

    Args:
        expected: the artifact that the decision was made against, as `current` had it; None for no model at all.

    Returns: the decision with its number.

    Raises:
        AcceptedError: another model was accepted meanwhile, so that the decision was made against the wrong one; or the
            address cannot be written to. Nothing was recorded.
    """
    for _ in range(TRIES):
        decisions = history(address)
        before = current(decisions)
        if decision.outcome != "refused" and (before.artifact if before else None) != expected:
            raise AcceptedError(
                f"{address}: {before.artifact if before else 'no model'} is accepted by now, and not {expected or 'no model'}, "
                "which this decision was made against; nothing was recorded: compare with that one"
            )
        numbered = decision.model_copy(update={"number": decisions[-1].number + 1 if decisions else 1})
        if _create(address, f"{HISTORY}/{numbered.number:06}.json", numbered.model_dump_json(indent=2).encode()):
            _point(address)
            return numbered
    raise AcceptedError(f"{address}: others recorded {TRIES} decisions while this one was; nothing was recorded: try again")


def rollback(address: str, reason: str) -> Decision:
    """Accepts the model before the accepted one again, as a new decision.

    Raises:
        AcceptedError: there is none before it; or as `record`.
    """
    standing = _standing(history(address))
    if len(standing) < 2:
        what = f"only {standing[0].artifact} was ever accepted" if standing else "no model is accepted"
        raise AcceptedError(f"{address}: {what}, so there is nothing to go back to")
    back, gone = standing[-2:]
    update = {"time": datetime.now(UTC), "outcome": "rolled back", "reason": f"{reason} (instead of {gone.artifact})"}
    return record(address, back.model_copy(update=update), expected=gone.artifact)


def _point(address: str) -> None:
    """Writes accepted.json; again where somebody decided meanwhile, so that the last one to write has seen all."""
    for _ in range(TRIES):
        standing = current(history(address))
        if standing is not None:
            _replace(address, POINTER, standing.model_dump_json(indent=2).encode())
        if current(history(address)) == standing:
            return


def _create(address: str, name: str, content: bytes) -> bool:
    """Writes a file that must not be there yet; false where it is."""
    filesystem, root = _opened(address)
    try:
        if "file" in filesystem.protocol:
            partial = _partial(Path(root, name), content)
            try:
                os.link(partial, Path(root, name))
            finally:
                partial.unlink()
        else:
            filesystem.pipe_file(f"{root}/{name}", content, mode="create")
    except Exception as error:
        # s3fs has no class for a condition that was not met.
        if isinstance(error, FileExistsError) or "PreconditionFailed" in str(error) or "pre-conditions" in str(error):
            return False
        raise _away(address, "written to", error) from error
    return True


def _replace(address: str, name: str, content: bytes) -> None:
    filesystem, root = _opened(address)
    try:
        if "file" in filesystem.protocol:
            _partial(Path(root, name), content).replace(Path(root, name))
        else:
            filesystem.pipe_file(f"{root}/{name}", content)
    except Exception as error:
        raise _away(address, "written to", error) from error


def _partial(target: Path, content: bytes) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return partial


def _opened(address: str) -> tuple[Any, str]:
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(address.rstrip("/"))
    except (ImportError, ValueError) as error:
        raise _away(address, "opened", error) from error
    return filesystem, root


def _away(address: str, what: str, error: Exception) -> AcceptedError:
    return AcceptedError(f"{address}: cannot be {what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
