"""Checkpoints of a run, at a folder or an address, from which any later attempt resumes. See
docs/checkpoints.md.

ledger: the files at an address that form a checkpoint. saver: from the Trainer's folder to the ledger,
asynchronously. staging: folders on the node. paths: addresses, and when checkpoints are deleted. resume: from
the ledger back, the same on all processes. find: the newest checkpoint, looked up outside of a run.
"""

from flytune.training.checkpoints.paths import clear
from flytune.training.checkpoints.saver import Saver

__all__ = ["Saver", "clear"]
