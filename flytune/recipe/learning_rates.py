"""Learning rates that no published run of a method and objective comes near, which a plan warns of or refuses."""

from flytune.recipe.optimizers import OPTIMIZERS
from flytune.recipe.recipe import Recipe

_USUAL = {
    # Supervised: full models are published with 1e-6 to 1e-4, small ones with up to 1e-3; adapters with about ten times as much
    # (Biderman et al. 2024, "LoRA Learns Less and Forgets Less").
    ("full", "labels"): 1e-4,
    ("adapter", "labels"): 1e-3,
    # Preferences and rewards: 1e-7 to 5e-6 (Rafailov et al. 2023; Ethayarajh et al. 2024; Shao et al. 2024), adapters to 1e-4.
    ("full", "preferences"): 5e-6,
    ("adapter", "preferences"): 1e-4,
}
"""Largest usual learning rate of AdamW, by method and what the loss is of."""
_DOUBTFUL = 20
"""Times that rate above which a recipe is doubted."""
_STEPS = {"adamw": 1.0, "adafactor": 1.0, "lion": 0.3}
"""Share of that rate at which another algorithm takes as large steps; SGD's steps are as large as its gradients."""
_IMPOSSIBLE = 1.0
"""Rate from which on a step of these algorithms, which moves each weight by about the rate, replaces a model's weights."""


def doubt(recipe: Recipe) -> str:
    """Return a sentence on a learning rate with which training most likely diverges; empty if there is none."""
    rate, algorithm = recipe.training.learning_rate, _algorithm(recipe)
    if algorithm not in _STEPS:
        return ""
    method = "full" if recipe.method.name == "full" else "adapter"
    aim = "labels" if recipe.objective.name in ("sft", "reward") else "preferences"
    usual = _USUAL[method, aim] * _STEPS[algorithm]
    if rate <= _DOUBTFUL * usual:
        return ""
    return (
        f"warning: training.learning_rate {rate:g}: with method {recipe.method.name}, objective {recipe.objective.name} and "
        f"{algorithm} training mostly diverges above {_DOUBTFUL * usual:g}; usual is at most {usual:g}"
    )


def problems(recipe: Recipe) -> list[str]:
    """Return what is wrong with a learning rate that can train no model; empty if nothing is."""
    rate, algorithm = recipe.training.learning_rate, _algorithm(recipe)
    if algorithm not in _STEPS or rate < _IMPOSSIBLE:
        return []
    return [
        f"training.learning_rate: {rate:g}: a step of {algorithm} moves each weight by about as much, and weights are "
        f"mostly below 0.1: nothing of the base is left; write a number such as {_USUAL['full', 'labels']:g}"
    ]


def _algorithm(recipe: Recipe) -> str:
    optim = recipe.training.optim
    return OPTIMIZERS[optim].algorithm if optim in OPTIMIZERS else "adamw"
