"""Nothing is divided by the number of processes outside training_estimates/degrees.py: samples have a degree
of their own."""

import re

import pytest

from tests.support.paths import ROOT
from tests.support.sources import files, name_of

FILES = files("flytune", "training_estimates", "tasks", "workflows", "flyte2")
DEGREES = ROOT / "training_estimates/degrees.py"
NUMBER = r"(int\(|max\(1, |\()?([\w.]+\.)?(world_size|num_processes|get_world_size)\b"
DIVISION = re.compile(
    rf"(//=?|/=?|%=?|::) ?{NUMBER}|(divmod|Fraction)\([^()]+, {NUMBER}|range\([^()]+, [^()]+, {NUMBER}"
)


def test_only_degrees_divide_by_the_number_of_processes():
    lines = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in FILES
        if path != DEGREES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if DIVISION.search(line)
    ]
    assert lines == [], "ask Degrees, which knows how many processes train samples of their own"


@pytest.mark.parametrize(
    "source",
    [
        "batch // plan.world_size",
        "batch % self.args.world_size",
        "batch /= shape.world_size",
        "1 / (args.world_size or 1)",
        "divmod(batch, world_size)",
        "Fraction(batch, args.world_size)",
        "rows[rank :: args.world_size]",
        "range(rank, rows, args.world_size)",
        "batch // torch.distributed.get_world_size()",
        "batch // accelerator.num_processes",
    ],
)
def test_a_division_is_found(source):
    assert DIVISION.search(source)


def test_other_uses_are_none():
    assert not DIVISION.search("price = rate * shape.world_size; args.world_size // nodes; rows[rank::step]")
