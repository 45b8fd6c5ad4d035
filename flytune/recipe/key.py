"""The key of a recipe: a hash of its decisions, by which checkpoints of all releases are found."""

import hashlib
import json
from typing import Any

from pydantic import BaseModel

_FIRST = {
    "": "name description model data method sharding training evaluation hardware checkpoints tracking "
    "publish notify",
    "model": "name_or_path revision dtype attn_implementation trust_remote_code",
    "data": "path dataset_name dataset_config dataset_split revision format columns max_samples sources "
    "system_prompt chat_template pad_token completion_only_loss max_length too_long packing heldout_fraction "
    "heldout_path max_bad_fraction deduplicate seed contract min_trained_fraction max_truncated_fraction "
    "max_dropped_fraction",
    "data.sources": "path dataset_name dataset_config dataset_split revision format columns max_samples "
    "weight",
    "method": "name r lora_alpha lora_dropout target_modules adapter",
    "sharding": "name offload",
    "training": "learning_rate global_batch_size per_device_train_batch_size auto_find_batch_size "
    "num_train_epochs max_steps lr_scheduler_type warmup_steps weight_decay max_grad_norm optim "
    "activation_checkpointing torch_compile probe_longest logging_steps hang_minutes max_loss_jump "
    "on_bad_loss seed",
    "evaluation": "max_samples eval_steps batch_size sample_answers max_new_tokens tasks include_path "
    "apply_chat_template task_shards shape must_not_fall",
    "evaluation.tasks": "name num_fewshot limit",
    "evaluation.must_not_fall": "task metric margin",
    "hardware": "shape accelerator max_price_per_hour spot max_hours max_price",
    "checkpoints": "save_steps save_total_limit folder name",
    "tracking": "report_to project",
    "publish": "address private every_save",
    "notify": "on email slack webhook",
}
"""Fields of 0.1.0 by section, which are always hashed. The list never grows: a newer field is hashed where it
is set."""


def of(recipe: BaseModel) -> str:
    """Return the identity of a run: 16 hex digits that change with any decision.

    Stored checkpoints are found by it, so a recipe keeps its key in later versions of Flytune.
    """
    text = json.dumps(_decisions(recipe, recipe.model_dump(), ""), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _decisions(section: BaseModel, content: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the dumped `content` of a section without fields newer than 0.1.0 that have their defaults."""
    decisions, first = {}, [*_FIRST.get(place, "").split(), *getattr(section, "always_in_key", ())]
    for name, field in type(section).model_fields.items():
        value, below = getattr(section, name), f"{place}.{name}".lstrip(".")
        if name not in content or (
            name not in first and value == field.get_default(call_default_factory=True)
        ):
            continue
        decisions[name] = content[name]
        if isinstance(value, BaseModel):
            decisions[name] = _decisions(value, content[name], below)
        elif isinstance(value, list):
            pairs = zip(value, content[name], strict=True)
            decisions[name] = [
                _decisions(item, part, below) if isinstance(item, BaseModel) else part for item, part in pairs
            ]
    return decisions
