"""Base models: geometry, files, loading, generation, scoring."""

from flytune.models.base import BaseRequest
from flytune.models.generation import Answer, Generation, end_markers
from flytune.models.geometry import Geometry, Linear, config_file, read_geometry
from flytune.models.scoring import Row, bootstrap, finite_loss, heldout_loss

__all__ = [
    "Answer",
    "BaseRequest",
    "Generation",
    "Geometry",
    "Linear",
    "Row",
    "adapter_config",
    "base",
    "bootstrap",
    "config_file",
    "config_json",
    "end_markers",
    "finite_loss",
    "generation",
    "geometry",
    "heldout_loss",
    "host_memory",
    "initial_adapter",
    "liger",
    "loading",
    "meta_model",
    "model_types",
    "pissa",
    "probe",
    "read_geometry",
    "remote",
    "reward_head",
    "safetensors_files",
    "scoring",
    "sharded_loading",
    "shared_cache",
    "sizes",
    "tensor_counts",
    "tensor_headers",
    "vocabulary",
    "weight_index",
]
