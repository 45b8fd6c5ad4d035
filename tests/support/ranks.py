"""The runner of ranks is flytune.selftest's."""

from flytune.selftest.processes import RankFailed, run

__all__ = ["RankFailed", "run"]
