"""Rewards: functions that judge a completion, in a process of their own."""

from flytune.rewards.process import Judged, RewardProcess, walls_of

__all__ = ["Judged", "RewardProcess", "walls_of"]
