"""PiSSA adapters as plain LoRA: of twice the rank, on the unchanged base.

PiSSA (Meng et al. 2024) starts from the largest singular values of each weight: W = W' + s B0 A0, of which W'
is frozen and the rest trained. What was trained is W' + s B A = W + s (B A - B0 A0): LoRA on W with the
factors [B, -B0] and [A; A0].
"""

import copy
import math
from typing import Any


def snapshot(model: Any) -> dict[str, Any]:
    """Return the factors of a new adapter, float32 in host memory, by their names in an export."""
    from peft import get_peft_model_state_dict

    trained = {name: one for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}
    named = get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False)
    factors = {name: one for name, one in named.items() if ".lora_A." in name or ".lora_B." in name}
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
    made = copy.deepcopy(config)
    # The scale is alpha / r, of rsLoRA alpha / sqrt(r).
    scale = math.sqrt(2) if made.use_rslora else 2
    made.init_lora_weights = True
    made.r, made.lora_alpha = 2 * made.r, scale * made.lora_alpha
    made.rank_pattern = {name: 2 * rank for name, rank in made.rank_pattern.items()}
    made.alpha_pattern = {name: scale * alpha for name, alpha in made.alpha_pattern.items()}
    return made
