"""Champion and challenger, compared on one node of the shape that evaluates; promotion and rollback on a
CPU."""

from flytune.evaluation import guards
from flytune.recipe import Recipe
from flytune.records import Metrics
from flytune.registry import ModelComparison, approval, compare, history, refresh
from flytune.stages import base_model
from flytune.stages.orchestrator import Folder, Orchestrator
from flytune.stages.stored import local, local_file


def compare_models(
    orchestrator: Orchestrator, recipe: Recipe, artifact: Folder, dataset: Folder, base: Folder, champion: str
) -> ModelComparison:
    """Compare challenger and champion on the same held-out tokens; without a champion, compare with the base
    model."""
    if not champion:
        return compare.compare_with_base(Metrics.read(local_file(orchestrator, artifact, "metrics.json")))
    base_model.unpack(orchestrator, base)
    return compare.compare_artifacts(
        recipe, local(orchestrator, artifact), local(orchestrator, dataset), champion
    )


def promote_challenger(
    orchestrator: Orchestrator,
    recipe: Recipe,
    accepted: str,
    champion: str,
    fingerprint: str,
    challenger: Recipe,
    artifact: Folder,
    comparison: ModelComparison,
) -> str:
    """Accept the challenger if it is significantly better, and record the decision with its figures in any
    case.

    Where a person has to approve it first, the question is stored with it, and the answer is what records the
    decision.
    """
    metrics = Metrics.read(local_file(orchestrator, artifact, "metrics.json"))
    place = refresh.final_address(artifact.address, challenger, metrics)
    broken = guards.broken(challenger, metrics)
    decision = refresh.decision_on(recipe, fingerprint, place, comparison, broken, metrics.doubts)
    if recipe.publish.approval is not None and decision.outcome == "accepted":
        asked = {"publish_to": recipe.publish.address or "", "accepted": accepted, "champion": champion}
        approval.ask(artifact.address, recipe, decision=decision, **asked)
        return f"waits for approval: {decision.reason}"
    decision = history.record(accepted, decision, expected=champion or None)
    return f"{decision.outcome}: {decision.reason}"


def rollback_accepted(accepted: str, reason: str) -> str:
    """Accept the previously accepted model again; return its artifact's address."""
    return history.rollback(accepted, reason).artifact
