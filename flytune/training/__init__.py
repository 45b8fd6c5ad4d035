"""The training loop, its callbacks, and checkpoints."""

from flytune.training.attempt import AttemptWriter

__all__ = ["AttemptWriter"]
