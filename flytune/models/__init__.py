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
    "adapted_layers",
    "adapter_config",
    "base",
    "base_identity",
    "bootstrap",
    "config_file",
    "config_files",
    "config_json",
    "end_markers",
    "expert_layers",
    "expert_probe",
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
    "reward_head",
    "safetensors_files",
    "scoring",
    "sharded_loading",
    "shared_cache",
    "tensor_headers",
    "vocabulary",
    "weight_index",
]
