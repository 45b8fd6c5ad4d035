"""Runner of ranks as processes, and a stand-in for the training arguments of a single process."""

from types import SimpleNamespace

from flytune.selftest.processes import RankFailed, run

__all__ = ["ALONE", "RankFailed", "run"]

ALONE = SimpleNamespace(world_size=1, device="cpu")
"""Stand-in for the training arguments of one process on a CPU."""
