"""Evaluation of the exported files."""

from flytune.evaluation import score
from flytune.recipe import Recipe
from flytune.records import Metrics
from flytune.stages import base_model
from flytune.stages.orchestrator import Folder, Orchestrator
from flytune.stages.stored import local


def evaluate_model(
    orchestrator: Orchestrator, recipe: Recipe, trained: Folder, dataset: Folder, base: Folder | None = None
) -> Metrics:
    """Score base and tuned model on the same held-out tokens, and compare their sample answers."""
    base_model.unpack(orchestrator, base)
    return score.score_in_subprocess(recipe, local(orchestrator, trained), local(orchestrator, dataset))
