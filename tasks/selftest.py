"""Self-test, on the machines that train: one Flyte task for each row of shapes.yaml that is one node.

SELFTEST maps shapes to tasks.
"""

from typing import Any

from flytekit import Deck

from flytune.errors import TrainingError
from flytune.selftest import matrix, table
from flytune.selftest.matrix import Matrix
from flytune.shapes import load_shapes
from images import TRAIN as IMAGE
from tasks.folders import fresh
from tasks.pods import declare


def selftest_machine(pairs: str) -> Matrix:
    """Every pair of method and sharding, or the named ones, held against plain training; the table as a deck."""
    filled = matrix.fill(fresh("selftest"), matrix.pairs_named(pairs))
    Deck("Self-test", table.html(filled))
    if not filled.is_good:
        Deck.publish()
        raise TrainingError(f"not every pair computes what plain training does; the run does not go on:\n{table.text(filled)}")
    return filled


SELFTEST: dict[str, Any] = {
    shape.name: declare(
        selftest_machine,
        f"selftest_{shape.identifier}",
        shape,
        globals(),
        container_image=IMAGE,
        enable_deck=True,
        deck_fields=(),
    )
    for shape in load_shapes()
    if shape.nodes == 1
}
