"""The accepted model, and the refresh that may replace it."""

from flytune.registry.history import Decision, ModelComparison

__all__ = ["Decision", "ModelComparison"]
