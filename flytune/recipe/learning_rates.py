"""Learning rates that no published run of a method and objective comes near, which a plan warns of."""

from flytune.recipe.optimizers import OPTIMIZERS
from flytune.recipe.recipe import Recipe

_LARGEST = {
    # Supervised: full models are published with 1e-6 to 1e-4, small ones with up to 1e-3; adapters with about ten times as much
    # (Biderman et al. 2024, "LoRA Learns Less and Forgets Less").
    ("full", "labels"): 2e-3,
    ("adapter", "labels"): 2e-2,
    # Preferences and rewards: 1e-7 to 5e-6 (Rafailov et al. 2023; Ethayarajh et al. 2024; Shao et al. 2024), adapters to 1e-4.
    ("full", "preferences"): 1e-4,
    ("adapter", "preferences"): 2e-3,
}
"""Largest learning rate without a warning, for AdamW, by method and what the loss is of: about twenty times the usual one."""
_OF_ADAMW = {"adamw": 1.0, "adafactor": 1.0, "lion": 0.3}
"""Share of that rate at which another algorithm takes as large steps; SGD's steps are as large as its gradients."""


def doubt(recipe: Recipe) -> str:
    """Return a sentence on a learning rate with which training most likely diverges; empty if there is none."""
    rate, optim = recipe.training.learning_rate, recipe.training.optim
    algorithm = OPTIMIZERS[optim].algorithm if optim in OPTIMIZERS else "adamw"
    if algorithm not in _OF_ADAMW:
        return ""
    method = "full" if recipe.method.name == "full" else "adapter"
    aim = "labels" if recipe.objective.name in ("sft", "reward") else "preferences"
    largest = _LARGEST[method, aim] * _OF_ADAMW[algorithm]
    if rate <= largest:
        return ""
    return (
        f"warning: training.learning_rate {rate:g}: more than {largest:g}, above which method {recipe.method.name} with "
        f"objective {recipe.objective.name} and {algorithm} mostly diverges; usual is about {largest / 20:.0e}"
    )
