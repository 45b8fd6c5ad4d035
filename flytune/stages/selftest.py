"""Self-test on the machines that train."""

from flytune.errors import TrainingError
from flytune.selftest import Matrix, Nodes, Trials, matrix, table
from flytune.stages.orchestrator import Orchestrator, Report


def selftest_machine(orchestrator: Orchestrator, report: Report, pairs: str) -> Matrix:
    """Compare every pair of method and sharding, or the named ones, with plain training; show the table."""
    return _shown(report, matrix.fill(orchestrator.new_folder() / "selftest", matrix.pairs_named(pairs)))


def selftest_nodes(orchestrator: Orchestrator, report: Report, pairs: str) -> Matrix:
    """Run the self-test over all nodes, in one process of each; the table of the first is returned."""
    named, nodes = matrix.pairs_named(pairs), Nodes()
    if nodes.rank > 0:
        Trials(orchestrator.new_folder() / "selftest", nodes=nodes).follow()
        # Only the value of rank 0 is kept.
        return Matrix(machine="", global_batch_size=0, cells=[], seconds=0.0)
    try:
        return _shown(report, matrix.fill(orchestrator.new_folder() / "selftest", named, nodes=nodes))
    finally:
        nodes.end()


def _shown(report: Report, filled: Matrix) -> Matrix:
    report(table.html(filled))
    if not filled.is_good:
        raise TrainingError(
            f"not every pair computes what plain training does; the run does not go on:\n{table.text(filled)}"
        )
    return filled
