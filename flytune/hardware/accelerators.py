"""Rows of accelerators.yaml: what the cluster's GPUs can do."""

from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flytune.errors import RecipeError
from flytune.files import SETTINGS
from flytune.schema import Strict
from flytune.written_files import load_rows
from training_estimates.accelerators import Accelerator

ACCELERATORS_FILE = SETTINGS / "accelerators.yaml"


class Accelerators(Strict):
    """The content of accelerators.yaml."""

    accelerators: Annotated[list[Accelerator], Field(min_length=1)]


@cache
def load_accelerators(path: Path = ACCELERATORS_FILE) -> dict[str, Accelerator]:
    """Return all rows, by name.

    Raises:
        RecipeError: the file is missing, or has mistakes, which are all listed; a name occurs twice.
    """
    return {row.name: row for row in load_rows(path, Accelerators, "accelerators")}


def accelerator_named(name: str) -> Accelerator:
    """Return the row of that name.

    Raises:
        RecipeError: there is none.
    """
    rows = load_accelerators()
    if name not in rows:
        raise RecipeError(
            f"{ACCELERATORS_FILE.name}: no row {name}, so the time of a step cannot be estimated; "
            f"add its data sheet's figures as a row, or name one of {', '.join(rows)}"
        )
    return rows[name]


def chip_of(name: str) -> str | None:
    """Return the chip of an accelerator; None where accelerators.yaml has no row of it."""
    row = load_accelerators().get(name)
    return row.chip if row else None
