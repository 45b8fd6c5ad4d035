"""Adapters: several on one base, merged into it, or combined into one."""

from flytune.adapters import gguf
from flytune.adapters.combining import combine
from flytune.adapters.loading import load
from flytune.adapters.merging import merge

__all__ = ["combine", "gguf", "load", "merge"]
