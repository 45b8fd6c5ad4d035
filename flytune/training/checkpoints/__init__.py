"""Saved states of a run, at a folder or an address, from which any later attempt goes on. See docs/checkpoints.md.

storage: files at an address. ledger: which of them are a checkpoint. saving: from the Trainer's folder to the ledger, beside
training. places: where, and when they may go. resuming: from the ledger back, the same on all processes.
"""

from flytune.training.checkpoints.paths import clear
from flytune.training.checkpoints.saver import Saver

__all__ = ["Saver", "clear"]
