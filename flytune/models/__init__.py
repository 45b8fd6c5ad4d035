"""Base models: files, loading, generation, scoring."""

from flytune.models.base import BaseRequest
from flytune.models.generation import GeneratedAnswer, Generation, end_markers
from flytune.models.scoring import Row, bootstrap, finite_loss, heldout_loss

__all__ = [
    "BaseRequest",
    "GeneratedAnswer",
    "Generation",
    "Row",
    "bootstrap",
    "end_markers",
    "finite_loss",
    "heldout_loss",
]
