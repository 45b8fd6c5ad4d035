"""Stand-ins for parts of a run."""

from types import SimpleNamespace

ALONE = SimpleNamespace(world_size=1, process_index=0, device="cpu")
"""Arguments of the only process of a run."""
NOTHING_SAVED = SimpleNamespace(saved_step=0, store_seconds=0.0, resumed_seconds=0.0)
"""A Saver without a checkpoint."""
