"""Rollouts: completions that a model draws in training, and their ledger."""

from flytune.rollouts.ledger import Group, Rollout, RolloutLedger
from flytune.rollouts.sampling import Completion, Drawing, draw, numbers

__all__ = ["Completion", "Drawing", "Group", "Rollout", "RolloutLedger", "draw", "numbers"]
