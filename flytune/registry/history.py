"""History of accepted models at a folder or an fsspec address: decisions that are only added, and a pointer
to the newest.

    ADDRESS/history/000001.json   one decision; its number is used once, and its content never changes
    ADDRESS/accepted.json         the newest decision that changed the accepted model, for readers that need
    no history

The accepted model follows from the history alone; accepted.json is written after it, atomically. Two writers
cannot get the same number: on a file system by a hard link, on S3 and Google Cloud Storage by a conditional
PUT (If-None-Match, ifGenerationMatch). A store without such a condition (some that only speak S3's protocol)
may lose one of two decisions that are made in the same second.
"""

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import Field

from flytune.errors import AcceptedError
from flytune.records.approval import ApprovalAnswer
from flytune.records.figures import LOSS, Figure
from flytune.schema import Record, RecordError, Strict, omitted
from flytune.sentences import counted
from flytune.storage import Storage

POINTER, HISTORY = "accepted.json", "history"
TRIES = 8
"""Number of tries to get a number that no other writer has taken."""


class ModelComparison(Strict):
    """A figure of two models on the same held-out samples, paired by sample, with 95 % intervals."""

    against: str
    """Address of the champion's artifact; `base` if the challenger was compared with its own base model."""
    figure: Figure = omitted(LOSS)
    """Figure of the objective that they were compared by."""
    champion: float
    challenger: float
    difference: float
    """Challenger minus champion; the figure says which direction is better."""
    difference_low: float
    difference_high: float
    samples: int
    tokens: int

    @property
    def is_won(self) -> bool:
        """Return whether the challenger is significantly better: the whole interval is on the better side of
        zero."""
        return self.difference_low > 0 if self.figure.better == "higher" else self.difference_high < 0

    def describe(self) -> str:
        """Return the figures in one line."""
        side = "on both sides of"
        if self.difference_high < 0:
            side = "below"
        elif self.difference_low > 0:
            side = "above"
        model = "its base model" if self.against == "base" else "the accepted model"
        ends = f"{self.difference_low:+.4f} to {self.difference_high:+.4f}"
        interval = f"the interval of the difference {self.difference:+.4f} ({ends}) is {side} zero"
        if self.samples < 2:
            interval = f"the difference {self.difference:+.4f} has no interval"
        return (
            f"held-out {self.figure.title} {self.challenger:.4f}, compared with {self.champion:.4f} of "
            f"{model} ({self.figure.direction}); {interval}, over {counted(self.samples, 'sample')}"
        )


class Decision(Record):
    """Entry of the history."""

    number: Annotated[int, Field(ge=1)] = 1
    """Position in the history, given when the decision is recorded."""
    time: datetime
    outcome: Literal["accepted", "refused", "rolled back"]
    artifact: str
    """Address of the model that was decided on; for a rollback, of the model that is accepted again."""
    method: str
    """Method of the recipe (full, lora, qlora), which says whether the artifact is a model or an adapter."""
    base: str = ""
    """Base model of the recipe, with @ and the revision if it has one."""
    recipe: str
    """Name and key of the recipe."""
    fingerprint: str
    """Fingerprint of the training data."""
    duel: ModelComparison | None = None
    reason: str
    approval: ApprovalAnswer | None = omitted(None)
    """Answer of the person who was asked, where the recipe has publish.approval."""


def decisions_at(address: str) -> list[Decision]:
    """Return all decisions, oldest first; an empty list if there are none yet.

    Raises:
        AcceptedError: the address cannot be read, or an entry is invalid.
    """
    storage = _storage(address)
    try:
        names = [name for name in storage.names(HISTORY) if name.endswith(".json")]
        return [Decision.parse(storage.read(f"{HISTORY}/{name}")) for name in names]
    except RecordError as error:
        raise AcceptedError(f"{address}/{HISTORY}: invalid entry: {error}") from None
    except FileNotFoundError as error:
        raise AcceptedError(
            f"{address}/{HISTORY}: an entry was deleted while it was read: {error}; try again"
        ) from None


def current(decisions: list[Decision]) -> Decision | None:
    """Return the decision whose model is accepted after all of them; None if no model is accepted."""
    return next(iter(_accepted(decisions)[-1:]), None)


def _accepted(decisions: list[Decision]) -> list[Decision]:
    """Return the decisions that accepted a model and were not rolled back; the last one is in force."""
    stack: list[Decision] = []
    for decision in decisions:
        if decision.outcome == "accepted":
            stack.append(decision)
        elif decision.outcome == "rolled back" and stack:
            stack.pop()
    return stack


def record(address: str, decision: Decision, expected: str | None) -> Decision:
    """Add a decision to the history, and update the pointer if the decision changes the accepted model.

    Args:
        address: folder or fsspec address of the history.
        decision: the decision; it is numbered here.
        expected: artifact of the model that was accepted when the decision was made, by `current`; None for
            no model.

    Returns: the decision with its number.

    Raises:
        AcceptedError: another model has been accepted meanwhile, so the decision compared with the wrong one,
            or the address cannot be written to. Nothing was recorded.
    """
    storage = _storage(address)
    for _ in range(TRIES):
        decisions = decisions_at(address)
        if decisions and _is_same(decisions[-1], decision):  # recorded by a try whose answer was lost
            _update_pointer(storage, address)
            return decisions[-1]
        before = current(decisions)
        if decision.outcome != "refused" and (before.artifact if before else None) != expected:
            raise AcceptedError(
                f"{address}: {before.artifact if before else 'no model'} is accepted by now, and not "
                f"{expected or 'no model'}, which this decision was made against; nothing was recorded: "
                "compare with the accepted model"
            )
        numbered = decision.model_copy(update={"number": decisions[-1].number + 1 if decisions else 1})
        if storage.create(
            f"{HISTORY}/{numbered.number:06}.json", numbered.model_dump_json(indent=2).encode()
        ):
            _update_pointer(storage, address)
            return numbered
    raise AcceptedError(
        f"{address}: other writers recorded a decision during each of {TRIES} tries; nothing was recorded: "
        "try again"
    )


def _is_same(first: Decision, second: Decision) -> bool:
    """Return whether two records are of one decision: a run's artifact is decided on once."""
    of_the_record = {"number", "time"}
    return first.model_dump(exclude=of_the_record) == second.model_dump(exclude=of_the_record)


def rollback(address: str, reason: str) -> Decision:
    """Accept the previously accepted model again, as a new decision.

    Raises:
        AcceptedError: there is no previous model; or as `record`.
    """
    accepted = _accepted(decisions_at(address))
    if len(accepted) < 2:
        what = f"only {accepted[0].artifact} was ever accepted" if accepted else "no model is accepted"
        raise AcceptedError(f"{address}: {what}, so there is nothing to go back to")
    previous, replaced = accepted[-2:]
    update = {
        "time": datetime.now(UTC),
        "outcome": "rolled back",
        "reason": f"{reason} (instead of {replaced.artifact})",
    }
    return record(address, previous.model_copy(update=update), expected=replaced.artifact)


def _update_pointer(storage: Storage, address: str) -> None:
    """Write accepted.json; again if another decision was recorded meanwhile, so that the last writer has seen
    all of them."""
    for _ in range(TRIES):
        accepted = current(decisions_at(address))
        if accepted is not None:
            storage.write(POINTER, accepted.model_dump_json(indent=2).encode())
        if current(decisions_at(address)) == accepted:
            return


def _storage(address: str) -> Storage:
    return Storage(address, key="", error=AcceptedError, retry=False)
