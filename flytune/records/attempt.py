"""Attempts of a run: what training.json says of each, and the record that a node keeps of its own while it
runs."""

from typing import Annotated, Self

from pydantic import Field

from flytune import limits
from flytune.records.plan import Plan
from flytune.schema import Record
from training_estimates.degrees import Degrees

DONE = "done"
"""End of an attempt that has succeeded."""
SIGTERM = "SIGTERM"
"""End of an attempt that got the signal and has said nothing since."""
_Number = Annotated[int, Field(ge=0, le=limits.COUNT)]


class Attempt(Record):
    """One attempt of a run. Of one that was killed, figures are those of its last record, which may be
    seconds older."""

    number: int
    """Place among the run's attempts, from 1 on."""
    execution: str = ""
    """Flyte's execution; empty on a machine of one's own."""
    retry: int = 0
    """Number of the attempt in its execution, from 0 on: Flyte's, after those of earlier actions for the same
    stage."""
    host: str = ""
    """Node of its first process: its name in Kubernetes, or the machine's."""
    ended: str = ""
    """Reason for which it ended, with the node where that began; empty of the attempt that finished the
    run."""
    resumed_from_step: int
    last_step: int
    """Last step that it trained; the step that it resumed from where it trained none."""
    shape: str
    world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    price_per_hour: float
    """Price of its machines."""
    seconds: float
    """Seconds of its training loop."""
    held_seconds: float
    """Seconds for which it held its machines: loading, training, saving and export."""
    peaks: dict[str, int] = Field(default={})
    """Peak bytes by phase, of the process with the largest peak; of a killed attempt, of its first
    process."""
    reserved_peaks: dict[str, int] = Field(default={})

    @property
    def key(self) -> tuple[str, int]:
        """Execution, and the attempt's place as its messages have it: by Flyte's number there, or by its
        place in the run."""
        return self.execution, self.retry + 1 if self.execution else self.number

    @property
    def name(self) -> str:
        """Attempt as the messages of its execution name it."""
        return f"attempt {self.key[1]}"

    @property
    def layout(self) -> str:
        """Shape and batches as a phrase."""
        batches = f"{self.per_device_train_batch_size} x {self.gradient_accumulation_steps} accumulated"
        return f"{self.shape}, {batches} x {Degrees(self.world_size).data_parallel}"

    def is_of(self, plan: Plan) -> bool:
        """Return whether it ran on the machines and with the batches of a plan, whose estimates are not of
        others."""
        fields = ("shape", "world_size", "per_device_train_batch_size", "gradient_accumulation_steps")
        return all(getattr(self, field) == getattr(plan, field) for field in fields)


class NodeAttempt(Attempt):
    """Record of one node's attempt: one file, rewritten while the attempt runs, of which a killed one leaves
    the last.

    Tasks of one process that train nothing have no figures of training.
    """

    resumed_from_step: int = 0
    last_step: int = 0
    shape: str = ""
    world_size: int = 0
    per_device_train_batch_size: int = 0
    gradient_accumulation_steps: int = 0
    price_per_hour: float = 0.0
    seconds: float = 0.0
    held_seconds: float = 0.0
    file_name: Annotated[str, Field(exclude=True)] = ""
    """Name of its file."""
    action: str = ""
    """Action of Flyte 2 whose pod it was; empty elsewhere."""
    node: int = 0
    """Place of the node among those of the attempt."""
    task: str = ""
    """Name of Flyte's task."""
    exports_only: bool = False
    """True if it trains no step, and is no attempt of the run."""
    phase: str = ""
    """Last phase; empty of one that only reports a failure."""
    used_bytes: int = 0
    """Host memory in use when the record was written."""
    allowed_bytes: int = 1
    """Host memory that the pod may take."""
    kind: str | None = None
    """Kind of the failure (flytune.failures.table), DONE or SIGTERM; None while the node runs, and once it
    was killed."""
    signalled: float | None = None
    """Time of a SIGTERM, in seconds since 1970."""
    reason: str = ""
    """The failure as its message says it; empty while the node runs, and once it was killed."""
    advice: str = ""
    """Advice of the message; empty where no message was made."""
    further: list[str] = Field(default=[])
    """Further lines of the message."""
    details: str = ""
    """A traceback, or the stacks of a hang."""
    left_out: list[_Number] = Field(default=[])
    """Data that later attempts skip, in units of one step's samples, ascending; 0 is the first step's in the
    data's order."""
    rollbacks: _Number = 0
    """Number of times that data was skipped, this one included; 0 where this attempt has skipped none."""
    order: str = ""
    """Key of the data and its order, of which `left_out` has positions."""

    @property
    def is_of_run(self) -> bool:
        """True if its figures are those of the run: it trains, and has the run's first process."""
        return self.world_size > 0 and self.node == 0 and not self.exports_only

    @property
    def memory(self) -> str:
        """Used and allowed memory as a phrase."""
        return f"{self.used_bytes / 2**30:.1f} of {self.allowed_bytes / 2**30:.1f} GiB of the pod's memory"

    @property
    def last_seen(self) -> str:
        """Task, attempt, phase and memory as a phrase."""
        return f"{self.task}, {self.name}, {self.phase}: {self.memory}"

    def figures(self, ended: str = "") -> Attempt:
        """Return the attempt as training.json has it, with the reason of its end."""
        values = {name: getattr(self, name) for name in Attempt.model_fields}
        return Attempt(**values | {"ended": ended})

    def replaced(self, **values: object) -> Self:
        """Return a copy with other values."""
        return self.model_copy(update=values)
