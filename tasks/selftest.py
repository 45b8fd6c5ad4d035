"""Self-test on the machines that train: one Flyte task for each row of shapes.yaml.

SELFTEST maps shapes to tasks. A row of several nodes is a job with one process a node, which starts the node's ranks.
"""

from typing import Any

from flytekit import Deck

from flytune.errors import TrainingError
from flytune.failures.table import RETRIES
from flytune.hardware import Shape, load_shapes
from flytune.selftest import Matrix, Nodes, Trials, matrix, table
from images import TRAIN as IMAGE
from tasks.runtime.directories import new_folder
from tasks.runtime.elastic import ranks
from tasks.runtime.pods import declare
from tasks.runtime.retries import report_failures


def selftest_machine(pairs: str) -> Matrix:
    """Compare every pair of method and sharding, or the named ones, with plain training; show the table as a deck."""
    return _with_deck(matrix.fill(new_folder() / "selftest", matrix.pairs_named(pairs)))


def selftest_nodes(pairs: str) -> Matrix:
    """Run the self-test over all nodes, in one process of each; the table of the first is returned."""
    with report_failures():
        named, nodes = matrix.pairs_named(pairs), Nodes()
        if nodes.rank > 0:
            Trials(new_folder() / "selftest", nodes=nodes).follow()
            # Flyte keeps only the value of rank 0.
            return Matrix(machine="", global_batch_size=0, cells=[], seconds=0.0)
        try:
            return _with_deck(matrix.fill(new_folder() / "selftest", named, nodes=nodes))
        finally:
            nodes.end()


def _with_deck(filled: Matrix) -> Matrix:
    Deck("Self-test", table.html(filled))
    if not filled.is_good:
        Deck.publish()
        raise TrainingError(f"not every pair computes what plain training does; the run does not go on:\n{table.text(filled)}")
    return filled


def _declared(shape: Shape) -> Any:
    common = {"container_image": IMAGE, "retries": RETRIES, "enable_deck": True, "deck_fields": ()}
    name = f"selftest_{shape.identifier}"
    if shape.nodes == 1:
        return declare(selftest_machine, name, shape, globals(), **common)
    return declare(selftest_nodes, name, shape, globals(), task_config=ranks(shape, processes=1), **common)


SELFTEST: dict[str, Any] = {shape.name: _declared(shape) for shape in load_shapes()}
