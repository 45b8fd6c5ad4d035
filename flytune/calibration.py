"""What runs were measured to need and take, of what was planned: a factor per shape, which later plans are multiplied by.

Factors lie in calibration.yaml beside shapes.yaml, which `flytune calibrate` writes; without that file plans are as told.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import Field

from flytune import yaml_core
from flytune.errors import RecipeError
from flytune.peaks import FIRST_STEP, STEP
from flytune.plans import Calibration, Plan
from flytune.recipe import Recipe
from flytune.records import Manifest, TrainingResult
from flytune.shapes import SHAPES_FILE
from flytune.strict import Record, Strict, load_rows

CALIBRATION_FILE = SHAPES_FILE.parent / "calibration.yaml"
COMPARISON = "comparison.json"
_OUTSIDE = ("CUDA context", "NCCL", "fragmentation")
"""Of planned GPU memory, what is not allocated by torch and so not in the measured peak."""


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


class Factor(Calibration):
    """A row of calibration.yaml."""

    name: str
    """Of the shape."""


class Factors(Strict):
    """The content of calibration.yaml."""

    factors: Annotated[list[Factor], Field(min_length=1)]


def compare(recipe: Recipe, plan: Plan, manifest: Manifest, training: TrainingResult) -> Comparison:
    """Plan beside what was measured."""
    is_gpu = plan.memory.resource == "GPU memory"
    left_out = _OUTSIDE if is_gpu else ()
    planned = {
        phase: sum(size for name, size in table.items() if name not in left_out) for phase, table in plan.memory.phases.items()
    }
    steps = training.steps[1:] or training.steps
    seconds = sum(step.seconds - step.eval_seconds for step in steps)
    # A logged step may stand for several; the first of all for those since the beginning.
    taken = steps[-1].step - (training.steps[0].step if training.steps[1:] else training.resumed_from_step) if steps else 0
    return Comparison(
        recipe=recipe.name,
        shape=plan.shape,
        full_length=recipe.data.packing or (recipe.training.probe_longest and manifest.longest >= recipe.data.max_length),
        planned_bytes=planned,
        measured_bytes=training.peaks,
        planned_step_seconds=sum(plan.step_seconds.values()) or None,
        measured_step_seconds=seconds / taken if taken else 0.0,
        planned_tokens_per_second=plan.tokens_per_second[1] if plan.tokens_per_second else None,
        measured_tokens_per_second=sum(step.tokens for step in steps) / seconds if seconds > 0 else 0.0,
        calibration=plan.calibration,
    )


def load_factors() -> dict[str, Factor]:
    """The rows of calibration.yaml by shape; none where the file is not there.

    Raises:
        RecipeError: the file lists all its mistakes; a shape stands twice.
    """
    return _read(CALIBRATION_FILE)


@cache
def _read(path: Path) -> dict[str, Factor]:
    return {row.name: row for row in load_rows(path, Factors, "factors")} if path.exists() else {}


def found(folders: Iterable[Path]) -> list[Comparison]:
    """The comparisons of all artifacts below `folders`.

    Raises:
        RecipeError: a folder is not there, or there is none in any of them.
    """
    files = []
    for folder in folders:
        if not folder.is_dir():
            raise RecipeError(f"{folder}: no such folder")
        files += sorted(folder.rglob(COMPARISON))
    if not files:
        raise RecipeError(f"no {COMPARISON} below {', '.join(map(str, folders))}: name folders that hold artifacts of runs")
    return [Comparison.read(file) for file in files]


def factors(comparisons: Sequence[Comparison]) -> list[Factor]:
    """A row for each shape that has runs to learn from: medians of measured over planned, the plans' own factors taken out."""
    rows = []
    for shape in sorted({one.shape for one in comparisons}):
        runs = [one for one in comparisons if one.shape == shape and one.memory_ratio is not None]
        if not runs:
            continue
        memory = [(one.memory_ratio or 1.0) * (one.calibration.memory if one.calibration else 1.0) for one in runs]
        speeds = [
            one.speed_ratio * (one.calibration.speed if one.calibration else 1.0) for one in runs if one.speed_ratio is not None
        ]
        speed = median(speeds) if speeds else 1.0
        rows.append(Factor(name=shape, memory=round(median(memory), 4), speed=round(speed, 4), runs=len(runs)))
    return rows


def write(rows: Sequence[Factor]) -> None:
    """Puts the rows into calibration.yaml, in the place of older ones of the same shapes; whole or not at all."""
    kept = {**load_factors(), **{row.name: row for row in rows}}
    head = (
        "# Measured over planned, by shape: `flytune calibrate` makes it, every plan uses it; without it plans are as told.\n"
    )
    fresh = CALIBRATION_FILE.with_suffix(".new")
    fresh.write_text(head + yaml_core.dump([row.model_dump() for row in kept.values()]), encoding="utf-8")
    fresh.replace(CALIBRATION_FILE)
    _read.cache_clear()
