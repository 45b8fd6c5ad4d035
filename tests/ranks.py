"""The runner of ranks is flytune.selftest's."""

from flytune.selftest.ranks import RankFailed, run

__all__ = ["RankFailed", "run"]
