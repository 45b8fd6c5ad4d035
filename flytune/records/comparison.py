"""The comparison of a plan with what its run measured."""

from flytune.records.plan import FIRST_STEP, STEP, Calibration
from flytune.schema import Record

COMPARISON = "comparison.json"


class Comparison(Record):
    """comparison.json of an artifact: plan beside what was measured."""

    recipe: str
    shape: str
    full_length: bool
    """Whether micro batches were as long as planned: packed, or the longest first. Factors are made of such runs alone."""
    planned_bytes: dict[str, int]
    """By phase; on a GPU what torch allocates, as it is measured."""
    measured_bytes: dict[str, int]
    planned_step_seconds: float | None
    measured_step_seconds: float
    planned_tokens_per_second: float | None
    measured_tokens_per_second: float
    """From the second logged stretch on: the first has what happens once."""
    calibration: Calibration | None
    """That the plan was multiplied by already."""

    @property
    def memory_ratio(self) -> float | None:
        """Measured peak of training, of the planned one; None where no such phase was measured."""
        phases = [phase for phase in (FIRST_STEP, STEP) if phase in self.measured_bytes and phase in self.planned_bytes]
        if not phases or not self.full_length:
            return None
        return max(self.measured_bytes[phase] for phase in phases) / max(self.planned_bytes[phase] for phase in phases)

    @property
    def speed_ratio(self) -> float | None:
        """Measured tokens a second, of those planned; None where none were planned, or samples were shorter."""
        if not self.planned_tokens_per_second or not self.full_length:
            return None
        return self.measured_tokens_per_second / self.planned_tokens_per_second
