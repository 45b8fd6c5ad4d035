"""Base models: geometry, files, loading, generation, scoring."""

from flytune.models.base import BaseRequest
from flytune.models.generation import Answer, Generation, end_markers
from flytune.models.geometry import Geometry, config_file, read_geometry
from flytune.models.scoring import Row, bootstrap, finite_loss, heldout_loss

__all__ = [
    "Answer",
    "BaseRequest",
    "Generation",
    "Geometry",
    "Row",
    "base",
    "bootstrap",
    "config_file",
    "end_markers",
    "finite_loss",
    "generation",
    "geometry",
    "heldout_loss",
    "host_memory",
    "initial_adapter",
    "loading",
    "pissa",
    "probe",
    "read_geometry",
    "remote",
    "safetensors_files",
    "scoring",
    "sharded_loading",
    "shared_cache",
    "vocabulary",
]
