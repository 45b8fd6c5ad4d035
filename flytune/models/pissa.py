"""PiSSA adapters as plain LoRA: of twice the rank, on the unchanged base.

PiSSA (Meng et al. 2024) starts from the largest singular values of each weight: W = W' + s B0 A0, of which W'
is frozen and the rest trained. What was trained is W' + s B A = W + s (B A - B0 A0): LoRA on W with the
factors [B, -B0] and [A; A0].
"""

import copy
import math
from typing import Any

from flytune.models import adapter_files


def snapshot(model: Any) -> dict[str, Any]:
    """Return the factors of a new adapter, float32 in host memory, by their names in an export."""
    factors = {
        name: parameter
        for name, parameter in adapter_files.trained(model).items()
        if ".lora_A." in name or ".lora_B." in name
    }
    return {name: factor.detach().float().cpu().clone() for name, factor in factors.items()}


def as_lora(state: dict[str, Any], initial: dict[str, Any]) -> dict[str, Any]:
    """Return an adapter's tensors with those factors that LoRA on the unchanged base has."""
    import torch

    def joined(name: str, trained: Any) -> Any:
        if name not in initial:
            return trained
        # Rows of A (r, in), columns of B (out, r).
        return (
            torch.cat([trained, initial[name]])
            if ".lora_A." in name
            else torch.cat([trained, -initial[name]], dim=1)
        )

    return {name: joined(name, trained) for name, trained in state.items()}


def config_as_lora(config: Any) -> Any:
    """Return PEFT's configuration of the same adapter as LoRA: twice the ranks, the same scales."""
    doubled = copy.deepcopy(config)
    # The scale is alpha / r, of rsLoRA alpha / sqrt(r).
    scale = math.sqrt(2) if doubled.use_rslora else 2
    doubled.init_lora_weights = True
    doubled.r, doubled.lora_alpha = 2 * doubled.r, scale * doubled.lora_alpha
    doubled.rank_pattern = {name: 2 * rank for name, rank in doubled.rank_pattern.items()}
    doubled.alpha_pattern = {name: scale * alpha for name, alpha in doubled.alpha_pattern.items()}
    return doubled
