"""Processes of training that are not there."""

from types import SimpleNamespace

ALONE = SimpleNamespace(world_size=1, device="cpu")
