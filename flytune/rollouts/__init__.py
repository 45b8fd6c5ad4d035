"""Rollouts: completions that a model draws in training, and their ledger."""

from flytune.records.rollouts import Group, Rollout
from flytune.rollouts.engines import vllm_types
from flytune.rollouts.engines.vllm import VllmServer, WantedAnswer
from flytune.rollouts.engines.vllm_process import VllmProcess
from flytune.rollouts.ledger import RolloutLedger
from flytune.rollouts.sampling import Completion, Drawing, chosen, draw, key_of, numbers, numbers_of

__all__ = [
    "Completion",
    "Drawing",
    "Group",
    "Rollout",
    "RolloutLedger",
    "VllmProcess",
    "VllmServer",
    "WantedAnswer",
    "chosen",
    "draw",
    "key_of",
    "numbers",
    "numbers_of",
    "vllm_types",
]
