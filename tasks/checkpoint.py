"""What a run goes on from, found before a GPU is asked for."""

from flytekit import Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune.recipe.recipe import Recipe
from flytune.records.dataset import Manifest
from flytune.training.checkpoints import find
from images import LIGHT
from tasks.runtime.directories import fetch_file, placed
from tasks.runtime.schema import trimmed


@trimmed
@task(container_image=LIGHT, requests=Resources(cpu="1", mem="1Gi"))
def find_checkpoint(recipe: Recipe, dataset: FlyteDirectory) -> Recipe:
    """The recipe, if there is a whole checkpoint of it and of its data; what follows waits for that answer."""
    find.required(placed(recipe), Manifest.read(fetch_file(dataset, "manifest.json")).content_sha256)
    return recipe
