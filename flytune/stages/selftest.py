"""Self-test on the machines that train."""

import os

from flytune.errors import TrainingError
from flytune.selftest import Matrix, Nodes, Trials, matrix, table
from flytune.stages.orchestrator import Orchestrator, Report


def selftest_machine(orchestrator: Orchestrator, report: Report, pairs: str) -> Matrix:
    """Compare every pair of method and sharding, or the named ones, with plain training; show the table."""
    named, folder = matrix.pairs_named(pairs), orchestrator.new_folder() / "selftest"
    if "RANK" not in os.environ:
        return _shown(report, matrix.fill(folder, named))
    # One of several nodes, with one rank each.
    nodes = Nodes()
    if nodes.rank > 0:
        Trials(folder, nodes=nodes).follow()
        # Only the value of rank 0 is kept.
        return Matrix(machine="", global_batch_size=0, cells=[], seconds=0.0)
    try:
        return _shown(report, matrix.fill(folder, named, nodes=nodes))
    finally:
        nodes.end()


def _shown(report: Report, filled: Matrix) -> Matrix:
    report(table.html(filled))
    if not filled.is_good:
        raise TrainingError(
            f"not every pair computes what plain training does; the run does not go on:\n{table.text(filled)}"
        )
    return filled
