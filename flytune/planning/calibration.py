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
from flytune.files import written_atomically
from flytune.hardware.shapes import SHAPES_FILE
from flytune.records.comparison import COMPARISON, Comparison
from flytune.records.plan import Calibration
from flytune.schema import Strict, load_rows

CALIBRATION_FILE = SHAPES_FILE.parent / "calibration.yaml"


class Factor(Calibration):
    """A row of calibration.yaml."""

    name: str
    """Of the shape."""


class Factors(Strict):
    """The content of calibration.yaml."""

    factors: Annotated[list[Factor], Field(min_length=1)]


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
    with written_atomically(CALIBRATION_FILE) as temporary:
        temporary.write_text(head + yaml_core.dump([row.model_dump() for row in kept.values()]), encoding="utf-8")
    _read.cache_clear()
