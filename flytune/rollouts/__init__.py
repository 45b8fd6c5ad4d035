"""Rollouts: completions that a model draws in training, and their ledger."""

from flytune.records.rollouts import Group, Rollout
from flytune.rollouts.ledger import RolloutLedger
from flytune.rollouts.sampling import Completion, Drawing, chosen, draw, numbers

__all__ = ["Completion", "Drawing", "Group", "Rollout", "RolloutLedger", "chosen", "draw", "numbers"]
