"""Base models: files, loading, generation, scoring."""

from flytune.models.base import BaseRequest
from flytune.models.config_json import config_file
from flytune.models.generation import GeneratedAnswer, Generation, end_markers
from flytune.models.scoring import Row, bootstrap, finite_loss, heldout_loss

__all__ = [
    "BaseRequest",
    "GeneratedAnswer",
    "Generation",
    "Row",
    "base",
    "base_identity",
    "bootstrap",
    "config_file",
    "config_json",
    "end_markers",
    "finite_loss",
    "generation",
    "heads",
    "heldout_loss",
    "host_memory",
    "initial_adapter",
    "liger",
    "loading",
    "model_types",
    "pissa",
    "probe",
    "published",
    "remote",
    "safetensors_files",
    "scoring",
    "sharded_loading",
    "tensor_headers",
    "vocabulary",
    "weight_index",
]
