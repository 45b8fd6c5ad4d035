"""comparison.json: a plan compared with the measurements of its run."""

from flytune.records.plan import FIRST_STEP, STEP, Calibration
from flytune.schema import Record

COMPARISON = "comparison.json"


class Comparison(Record):
    """comparison.json of an artifact: planned and measured figures."""

    recipe: str
    shape: str
    full_length: bool
    """True if micro batches were as long as planned: packed, or the longest first. Only such runs give
    calibration factors."""
    planned_bytes: dict[str, int]
    """Planned peak by phase; on a GPU the bytes that torch allocates, which are also measured."""
    measured_bytes: dict[str, int]
    """Measured peak by phase."""
    planned_step_seconds: float | None
    measured_step_seconds: float
    planned_tokens_per_second: float | None
    measured_tokens_per_second: float
    """Measured tokens per second, from the second logged step on: the first includes one-time work."""
    calibration: Calibration | None
    """Calibration that the plan was multiplied by."""

    @property
    def memory_ratio(self) -> float | None:
        """Measured peak of training divided by the planned one; None if no such phase was measured."""
        phases = [
            phase
            for phase in (FIRST_STEP, STEP)
            if phase in self.measured_bytes and phase in self.planned_bytes
        ]
        if not phases or not self.full_length:
            return None
        return max(self.measured_bytes[phase] for phase in phases) / max(
            self.planned_bytes[phase] for phase in phases
        )

    @property
    def speed_ratio(self) -> float | None:
        """Measured tokens per second divided by the planned ones; None if none were planned, or samples were
        shorter."""
        if not self.planned_tokens_per_second or not self.full_length:
            return None
        return self.measured_tokens_per_second / self.planned_tokens_per_second
