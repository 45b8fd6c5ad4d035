"""Runner of ranks as processes, and stand-ins for parts of a run of one process."""

from types import SimpleNamespace

from flytune.selftest import RankFailed
from flytune.selftest.processes import run

__all__ = ["ALONE", "NOTHING_SAVED", "RankFailed", "run"]

ALONE = SimpleNamespace(world_size=1, process_index=0, device="cpu")
"""Stand-in for the training arguments of one process on a CPU."""
NOTHING_SAVED = SimpleNamespace(saved_step=0, store_seconds=0.0, resumed_seconds=0.0)
"""Stand-in for a Saver without a checkpoint."""
