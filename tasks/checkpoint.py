"""Checkpoint of a resumed run, looked up before a GPU is requested."""

from flytekit import Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune.recipe import Recipe
from flytune.records import Manifest
from flytune.training.checkpoints import find
from images import LIGHT
from tasks.runtime.directories import fetch_file, with_checkpoint_folder
from tasks.runtime.schema import without_schema
from tasks.runtime.volumes import light_pod


@without_schema
@task(container_image=LIGHT, pod_template=light_pod(), requests=Resources(cpu="1", mem="1Gi"))
def find_checkpoint(recipe: Recipe, dataset: FlyteDirectory) -> Recipe:
    """Return the recipe if it has a complete checkpoint for its data, so that later tasks wait for this check."""
    find.required(with_checkpoint_folder(recipe), Manifest.read(fetch_file(dataset, "manifest.json")).content_sha256)
    return recipe
