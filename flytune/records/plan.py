"""plan.json: what a run is made of, what it needs of each resource in each phase, and what it will take."""

from typing import Literal

from pydantic import Field

from flytune.schema import Record, Strict

LOAD, FIRST_STEP, STEP, EVALUATE, SAVE, EXPORT = "load", "first step", "steady step", "evaluate", "save", "export"
PHASES = (LOAD, FIRST_STEP, STEP, EVALUATE, SAVE, EXPORT)
"""In the order in which a run first meets them."""

TIGHT = 0.9
"""Share of a resource beyond which a plan is tight: of published runs within 10 % of the limit, the estimate is wrong about
some, of those further from it about one in a hundred (docs/measured.md)."""


class Need(Strict):
    """One resource: what is needed of it, by phase of the run and component, at the moment of the phase that needs most."""

    resource: Literal["GPU memory", "process memory", "host memory", "/dev/shm", "disk"]
    """Of one GPU; of one process (on a cpu shape); the others of a node."""
    available_bytes: int
    phases: dict[str, dict[str, int]]
    """Phase (one of PHASES) -> component -> bytes."""
    engine: Literal["closed form", "dry run"] = "closed form"
    """Where the figures of the first and of a steady step are from."""

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak_bytes(self) -> int:
        return sum(self.phases[self.peak_phase].values())

    @property
    def share(self) -> float:
        """Needed at the peak, of what there is."""
        return self.peak_bytes / self.available_bytes

    @property
    def margin_bytes(self) -> int:
        """What is left at the peak; negative where it does not fit."""
        return self.available_bytes - self.peak_bytes

    @property
    def largest(self) -> tuple[str, int]:
        """The component that most of the peak is of."""
        return max(self.phases[self.peak_phase].items(), key=lambda item: item[1])

    @property
    def components(self) -> list[str]:
        """Of all phases; the largest at the peak first."""
        names = {name: size for phase in self.phases.values() for name, size in phase.items()}
        names |= self.phases[self.peak_phase]
        return sorted(names, key=lambda name: (-self.phases[self.peak_phase].get(name, 0), -names[name]))


class Calibration(Strict):
    """What was measured on a shape, of what was planned for it (flytune/planning/calibration.py)."""

    memory: float
    speed: float
    runs: int
    """That it is the median of."""


class Interruptions(Strict):
    """What interruptions of the machines, and the saves against them, are expected to cost."""

    per_hour: float
    save_seconds: float
    """That a checkpoint takes to write, guessed until the run has measured it."""
    interval_seconds: float | None
    """Of training between two saves; None where nothing is saved."""
    best_interval_seconds: float | None
    """That loses least (flytune/planning/save_interval.py); None where no interruption is expected."""
    hours_lost_each: float | None
    """By one interruption; None where it is the whole run."""
    share_lost: float
    """Of the run's time: saves, what is trained again, restarts; 0 without checkpoints, where it is all or nothing."""


class Plan(Record):
    """Frozen; nothing is ever written back into it."""

    recipe: str
    """The recipe's name."""
    key: str
    """The recipe's key."""
    shape: str
    accelerator: str
    nodes: int
    processes: int
    """A node; 1 under device_map, whatever the number of GPUs."""
    world_size: int
    global_batch_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    needs: list[Need]
    """GPU (or process) memory first."""
    total_parameters: int
    trained_parameters: int
    price_per_hour: float
    """US dollars for all nodes."""
    step_seconds: dict[str, float] = Field(default={})
    """Forecast of one optimizer step, by part; empty on a CPU, and where accelerators.yaml has no row of the GPU."""
    tokens_per_second: list[float] = Field(default=[])
    """Forecast over all GPUs: likely at least, the estimate, likely at most."""
    steps: int | None = None
    """Optimizer steps; None where the number of samples is not known before they are prepared."""
    hours: list[float] = Field(default=[])
    """Of all steps, every sample as long as data.max_length: likely at least, the estimate, likely at most."""
    interruptions: Interruptions | None = None
    """None where the time of a step is not known."""
    calibration: Calibration | None = None
    """That memory and speed above were multiplied by, where the shape has one."""
    reasons: list[str]
    """Why the values are what they are, a sentence each."""

    @property
    def memory(self) -> Need:
        """Of a GPU; on a cpu shape of a process."""
        return self.needs[0]

    @property
    def room_for_weights(self) -> int:
        """Bytes of one GPU that a layer-by-layer placement may fill with weights: what everything else at the peak leaves."""
        at_peak = self.memory.phases[self.memory.peak_phase]
        beside = sum(size for name, size in at_peak.items() if name != "weights")
        return round(TIGHT * self.memory.available_bytes) - beside

    @property
    def binding(self) -> Need:
        """The resource that is nearest to its end."""
        return max(self.needs, key=lambda need: need.share)

    @property
    def verdict(self) -> str:
        """`fits`, `tight` or `does not fit`."""
        return verdict(self.binding.share)

    @property
    def headline(self) -> str:
        """Peak, verdict and price in a line, as the recipes' headers have it."""
        need, billion = self.memory, self.price_per_billion_tokens
        peak = f"{need.peak_bytes / 2**30:.1f} of {need.available_bytes / 2**30:.1f} GiB of {need.resource} ({self.verdict})"
        return f"{peak}, ${self.price_per_hour:.2f} an hour" + (f", ${billion:,.0f} a billion tokens" if billion else "")

    @property
    def price(self) -> list[float]:
        """US dollars of the run: likely at least, the estimate, likely at most; without start-up, loading and saving."""
        return [hours * self.price_per_hour for hours in self.hours]

    @property
    def price_per_billion_tokens(self) -> float | None:
        """US dollars."""
        return 1e9 / self.tokens_per_second[1] / 3600 * self.price_per_hour if self.tokens_per_second else None


def verdict(share: float) -> str:
    """What a share of a resource means."""
    return "does not fit" if share > 1 else "tight" if share > TIGHT else "fits"
