"""What a run goes on from, found before a GPU is asked for."""

from flytekit import Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune.checkpoints import finding
from flytune.recipe import Recipe
from flytune.records import Manifest
from images import LIGHT
from tasks.folders import fetch_file, placed
from tasks.interfaces import trimmed


@trimmed
@task(container_image=LIGHT, requests=Resources(cpu="1", mem="1Gi"))
def find_checkpoint(recipe: Recipe, dataset: FlyteDirectory) -> Recipe:
    """The recipe, if there is a whole checkpoint of it and of its data; what follows waits for that answer."""
    finding.required(placed(recipe), Manifest.read(fetch_file(dataset, "manifest.json")).content_sha256)
    return recipe
