"""Learning rates that no published run of a method and objective comes near, which a plan warns of or
refuses."""

from flytune.recipe.optimizers import OPTIMIZERS
from flytune.recipe.recipe import Recipe

_DOUBTFUL = 20
"""Times the largest usual rate above which a recipe is doubted."""
_STEPS = {"adamw": 1.0, "adafactor": 1.0, "lion": 0.3}
"""Share of that rate at which another algorithm takes as large steps; SGD's steps are as large as its
gradients."""
_IMPOSSIBLE = 1.0
"""Rate from which on a step of these algorithms, which moves each weight by about the rate, replaces a
model's weights."""


def doubt(recipe: Recipe) -> str:
    """Return a sentence on a learning rate with which training most likely diverges; empty if there is
    none."""
    rate, algorithm = recipe.training.learning_rate, _algorithm(recipe)
    if algorithm not in _STEPS:
        return ""
    usual = _usual(recipe) * _STEPS[algorithm]
    if rate <= _DOUBTFUL * usual:
        return ""
    return (
        f"warning: training.learning_rate {rate:g}: with method {recipe.method.name}, objective "
        f"{recipe.objective.name} and {algorithm} training mostly diverges above {_DOUBTFUL * usual:g}; "
        f"usual is at most {usual:g}"
    )


def problems(recipe: Recipe) -> list[str]:
    """Return what is wrong with a learning rate that can train no model; empty if nothing is."""
    rate, algorithm = recipe.training.learning_rate, _algorithm(recipe)
    if algorithm not in _STEPS or rate < _IMPOSSIBLE:
        return []
    return [
        f"training.learning_rate: {rate:g}: a step of {algorithm} moves each weight by about as much, and "
        "weights are mostly below 0.1: nothing of the base is left; write a number such as "
        f"{_usual(recipe):g}"
    ]


def _usual(recipe: Recipe) -> float:
    of_full_models, of_adapters = recipe.objective.usual_learning_rates
    return of_full_models if recipe.method.name == "full" else of_adapters


def _algorithm(recipe: Recipe) -> str:
    optim = recipe.training.optim
    return OPTIMIZERS[optim].algorithm if optim in OPTIMIZERS else "adamw"
