"""plan.json: the layout of a run, its resources in each phase, its time and its price."""

import math
from typing import Literal, Self

from pydantic import Field

from flytune.schema import Record, Strict
from training_estimates.degrees import Degrees

LOAD, FIRST_STEP, STEP, EVALUATE, SAVE, EXPORT = (
    "load",
    "first step",
    "steady step",
    "evaluate",
    "save",
    "export",
)
DRAW = "draw answers"
"""Phase of runs whose model draws the answers that it trains, before each step."""
PHASES = (LOAD, FIRST_STEP, STEP, DRAW, EVALUATE, SAVE, EXPORT)
"""Phases of a run, in the order of a plan's table."""

TIGHT = 0.9
"""Share of a resource above which a plan is tight: the estimate is wrong for some of the published runs
within 10 % of the limit, and for about one in a hundred of those further away (docs/measured/memory.md)."""


class Need(Strict):
    """The need of one resource: its peak in each phase of the run, by component."""

    resource: Literal["GPU memory", "process memory", "host memory", "/dev/shm", "disk", "vLLM's GPU memory"]
    """Resource of one GPU, or of the part of it that a server of vLLM takes; on a cpu shape of one process;
    otherwise of a node."""
    available_bytes: int
    phases: dict[str, dict[str, int]]
    """Phase (one of PHASES) -> component -> bytes."""
    engine: Literal["closed form", "dry run"] = "closed form"
    """Source of the figures of the first and of a steady step."""

    @property
    def peak_phase(self) -> str:
        """Phase that needs most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak_bytes(self) -> int:
        return sum(self.phases[self.peak_phase].values())

    @property
    def share(self) -> float:
        """Peak divided by the available bytes."""
        return self.peak_bytes / self.available_bytes if self.available_bytes > 0 else math.inf

    @property
    def margin_bytes(self) -> int:
        """Available bytes minus the peak; negative if the run does not fit."""
        return self.available_bytes - self.peak_bytes

    @property
    def largest(self) -> tuple[str, int]:
        """Largest component at the peak, and its bytes."""
        return max(self.phases[self.peak_phase].items(), key=lambda item: item[1])

    @property
    def components(self) -> list[str]:
        """Components of all phases; the largest at the peak first."""
        names = {name: size for phase in self.phases.values() for name, size in phase.items()}
        names |= self.phases[self.peak_phase]
        return sorted(names, key=lambda name: (-self.phases[self.peak_phase].get(name, 0), -names[name]))


class Calibration(Strict):
    """Ratios of measured to planned figures on a shape (flytune/planning/calibration.py)."""

    memory: float
    speed: float
    runs: int
    """Number of runs that the ratios are the medians of."""


class Estimate(Strict):
    """An estimated figure, and the interval in which nine of ten runs are."""

    low: float
    value: float
    high: float
    held_out: int
    """Number of published runs that the interval was compared with, and not made from."""
    coverage: float
    """Share of those runs that were inside it."""

    def times(self, factor: float) -> "Estimate":
        """Return the estimate of a figure that is a multiple of this one."""
        scaled = {name: factor * getattr(self, name) for name in ("low", "value", "high")}
        return self.model_copy(update=scaled)


class Interruptions(Strict):
    """The expected cost of machine interruptions, and of the checkpoints that limit it."""

    per_hour: float
    save_seconds: float
    """Seconds to write a checkpoint; an estimate until the run has measured it."""
    interval_seconds: float | None
    """Seconds of training between two checkpoints; None if none are saved."""
    best_interval_seconds: float | None
    """Interval that loses least time (flytune/planning/save_interval.py); None if no interruption is
    expected."""
    hours_lost_each: float | None
    """Hours lost by one interruption; None if it loses the complete run."""
    share_lost: float
    """Share of the run's time spent on saves, repeated training and restarts; 0 without checkpoints."""


class Loading(Strict):
    """The expected time of an attempt to load the base model's weights on a cluster."""

    source: str
    """Place of the weights before: a volume or the cluster's storage."""
    bytes: int
    """Size of the weights as they are stored."""
    parts: dict[str, float]
    """Seconds of each part, by the place that is read and its rate."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class Plan(Record):
    """plan.json: everything that follows from a recipe and the shapes; frozen, like every record."""

    recipe: str
    """The recipe's name."""
    key: str
    """The recipe's key."""
    shape: str
    accelerator: str
    nodes: int
    processes: int
    """Processes per node, without GPUs that draw alone; 1 under device_map, for any number of GPUs."""
    world_size: int
    sequence_parallel: int = Field(default=1)
    """Processes that divide the positions of each sample among themselves."""
    global_batch_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    needs: list[Need]
    """Needs of all resources; GPU (or process) memory first."""
    total_parameters: int
    trained_parameters: int
    price_per_hour: float
    """Price of all nodes in US dollars per hour."""
    step_seconds: dict[str, float] = Field(default={})
    """Estimated seconds of one optimizer step, by part; empty on a CPU, and if accelerators.yaml has no row
    for the GPU."""
    tokens_per_second: list[float] = Field(default=[])
    """Estimated tokens per second over all GPUs: likely minimum, estimate, likely maximum."""
    steps: int | None = None
    """Number of optimizer steps; None if the number of samples is unknown before they are prepared."""
    hours: list[float] = Field(default=[])
    """Hours of all steps if every sample is data.max_length long: likely minimum, estimate, likely
    maximum."""
    interruptions: Interruptions | None = None
    """Expected cost of interruptions; None if the time of a step, or of an epoch between saves, is
    unknown."""
    loading: Loading | None = None
    """Expected time to load the base model; None on a CPU."""
    intervals: dict[str, Estimate] = Field(default={})
    """Intervals of allocated_bytes and reserved_bytes (peaks of a GPU in training, as torch counts them),
    step_seconds, tokens_per_second, hours and price, as far as they are known; after_a_run: of
    tokens_per_second once a run of the model on the shape was measured (`flytune calibrate`). Empty on a CPU,
    and for models that the closed form does not know."""
    calibration: Calibration | None = None
    """Calibration that memory and speed above were multiplied by, if the shape has one."""
    reasons: list[str]
    """Reasons for the values above, a sentence each."""

    @property
    def degrees(self) -> Degrees:
        """Processes of the run, and what they divide."""
        return Degrees(self.world_size, self.nodes, sequence_parallel=self.sequence_parallel)

    def with_micro_batch(self, most: int) -> Self | None:
        """Return the plan with the largest micro batch of at most `most` that makes the same global batch;
        None of 0."""
        share = self.per_device_train_batch_size * self.gradient_accumulation_steps
        size = next((fewer for fewer in range(min(most, share), 0, -1) if share % fewer == 0), None)
        if size is None:
            return None
        batches = {"per_device_train_batch_size": size, "gradient_accumulation_steps": share // size}
        return self.model_copy(update=batches)

    def halved(self) -> Self | None:
        """Return the next plan where GPU memory does not suffice: half the micro batch at most; None if there
        is none."""
        return self.with_micro_batch(self.per_device_train_batch_size // 2)

    @property
    def memory(self) -> Need:
        """Need of GPU memory; on a cpu shape, of process memory."""
        return self.needs[0]

    def host_bytes(self, phase: str) -> int | None:
        """Return the host memory of a node in a phase, in bytes; None where nothing of it is known."""
        for need in self.needs:
            if phase in need.phases and need.resource in ("host memory", "process memory"):
                processes = self.processes if need.resource == "process memory" else 1
                return processes * sum(need.phases[phase].values())
        return None

    @property
    def room_for_weights(self) -> int:
        """Bytes of one GPU for the weights of a layer-by-layer placement: the tight limit minus everything
        else at the peak."""
        at_peak = self.memory.phases[self.memory.peak_phase]
        others = sum(size for name, size in at_peak.items() if name != "weights")
        return round(TIGHT * self.memory.available_bytes) - others

    @property
    def binding(self) -> Need:
        """Need with the largest share of its resource."""
        return max(self.needs, key=lambda need: need.share)

    @property
    def verdict(self) -> str:
        """`fits`, `tight` or `does not fit`."""
        return verdict(self.binding.share)

    @property
    def headline(self) -> str:
        """Peak, verdict and price in one line, as in the headers of recipes."""
        need, billion = self.memory, self.price_per_billion_tokens
        peak = (
            f"{need.peak_bytes / 2**30:.1f} of {need.available_bytes / 2**30:.1f} GiB of {need.resource} "
            f"({self.verdict})"
        )
        return f"{peak}, ${self.price_per_hour:.2f} an hour" + (
            f", ${billion:,.0f} a billion tokens" if billion else ""
        )

    @property
    def price(self) -> list[float]:
        """Price of the run in US dollars: likely minimum, estimate, likely maximum; without start-up, loading
        and saving."""
        return [hours * self.price_per_hour for hours in self.hours]

    @property
    def loading_price(self) -> float:
        """Price in US dollars of all nodes while an attempt loads the base model."""
        return self.loading.seconds / 3600 * self.price_per_hour if self.loading else 0.0

    @property
    def price_per_billion_tokens(self) -> float | None:
        """Price of a billion tokens in US dollars; None if the speed is unknown."""
        return (
            1e9 / self.tokens_per_second[1] / 3600 * self.price_per_hour if self.tokens_per_second else None
        )


def verdict(share: float) -> str:
    """Return the verdict on a share of a resource: `fits`, `tight` or `does not fit`."""
    if share > 1:
        return "does not fit"
    return "tight" if share > TIGHT else "fits"
