"""Calibration: for each shape, the ratio of measured to planned memory and speed, by which later plans are
multiplied.

Factors are in calibration.yaml beside shapes.yaml, which `flytune calibrate` writes; without that file plans
are not changed.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import Field

from flytune import yaml_core
from flytune.errors import RecipeError
from flytune.files import ROOT, new_output
from flytune.records import Calibration, Comparison
from flytune.records.comparison import COMPARISON
from flytune.schema import RecordError, Strict
from flytune.written_files import load_rows

CALIBRATION_FILE = (ROOT or Path()) / "calibration.yaml"


class Factor(Calibration):
    """A row of calibration.yaml."""

    name: str
    """Name of the shape."""


class Factors(Strict):
    """The content of calibration.yaml."""

    factors: Annotated[list[Factor], Field(min_length=1)]


def load_factors() -> dict[str, Factor]:
    """Return the rows of calibration.yaml by shape; none if there is no such file.

    Raises:
        RecipeError: the file has mistakes, which are all listed; a shape occurs twice.
    """
    return _read(CALIBRATION_FILE)


@cache
def _read(path: Path) -> dict[str, Factor]:
    return {row.name: row for row in load_rows(path, Factors, "factors")} if path.exists() else {}


def found(folders: Iterable[Path]) -> list[Comparison]:
    """Return the comparisons of all artifacts below `folders`.

    Raises:
        RecipeError: a folder does not exist, no folder has a comparison, or one cannot be read.
    """
    files = []
    for folder in folders:
        if not folder.is_dir():
            raise RecipeError(f"{folder}: no such folder")
        files += sorted(folder.rglob(COMPARISON))
    if not files:
        raise RecipeError(
            f"no {COMPARISON} below {', '.join(map(str, folders))}: name folders that hold artifacts of runs"
        )
    return [_comparison(file) for file in files]


def _comparison(file: Path) -> Comparison:
    try:
        return Comparison.read(file)
    except (RecordError, OSError) as error:
        raise RecipeError(f"{file}: cannot be read: {error}; leave out its artifact") from None


def factors(comparisons: Sequence[Comparison]) -> list[Factor]:
    """Return a row for each shape that has usable runs: medians of measured over planned, without the plans'
    own factors."""
    rows = []
    for shape in sorted({comparison.shape for comparison in comparisons}):
        runs = [
            comparison
            for comparison in comparisons
            if comparison.shape == shape and comparison.memory_ratio is not None
        ]
        if not runs:
            continue
        memory = [
            (run.memory_ratio or 1.0) * (run.calibration.memory if run.calibration else 1.0) for run in runs
        ]
        speeds = [
            run.speed_ratio * (run.calibration.speed if run.calibration else 1.0)
            for run in runs
            if run.speed_ratio is not None
        ]
        speed = median(speeds) if speeds else 1.0
        rows.append(
            Factor(name=shape, memory=round(median(memory), 4), speed=round(speed, 4), runs=len(runs))
        )
    return rows


def write(rows: Sequence[Factor]) -> None:
    """Write the rows into calibration.yaml, instead of older ones of the same shapes, atomically."""
    kept = {**load_factors(), **{row.name: row for row in rows}}
    head = "# Measured over planned, by shape: `flytune calibrate` makes it, every plan uses it.\n"
    with new_output(CALIBRATION_FILE) as temporary:
        temporary.write_text(
            head + yaml_core.dump([row.model_dump() for row in kept.values()]), encoding="utf-8"
        )
    _read.cache_clear()
