"""Store: one artifact, whole or not at all."""

from flytekit import Deck, Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune import artifact, checkpoints
from flytune.metrics import Metrics
from flytune.plans import Plan
from flytune.recipe import Recipe
from flytune.records import Manifest, TrainingResult
from images import LIGHT
from tasks.folders import fetch, fresh, placed


@task(container_image=LIGHT, requests=Resources(cpu="2", mem="8Gi"), enable_deck=True, deck_fields=())
def store_artifact(
    recipe: Recipe, plan: Plan, dataset: FlyteDirectory, trained: FlyteDirectory, metrics: Metrics
) -> FlyteDirectory:
    """The artifact, with its report as a file and as this task's deck; published where the recipe says."""
    folder = artifact.store(recipe, plan, fetch(dataset), fetch(trained), metrics, fresh(recipe.name))
    Deck("Report", (folder / "report.html").read_text(encoding="utf-8"))
    if recipe.publish.address:
        artifact.publish(folder, recipe.publish.address, artifact.published_name(folder, recipe))
    checkpoints.clear(placed(recipe), Manifest.read(folder / "manifest.json"), TrainingResult.read(folder / "training.json"))
    return FlyteDirectory(str(folder))
