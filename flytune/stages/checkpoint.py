"""Checkpoint of a resumed run, looked up before a GPU is requested."""

from flytune.recipe import Recipe
from flytune.records import Manifest
from flytune.stages.orchestrator import Folder, Orchestrator
from flytune.stages.stored import local_file, with_checkpoint_folder
from flytune.training.checkpoints import find


def find_checkpoint(orchestrator: Orchestrator, recipe: Recipe, dataset: Folder) -> Recipe:
    """Return the recipe if it has a complete checkpoint for its data, so that later stages wait for this
    check."""
    manifest = Manifest.read(local_file(orchestrator, dataset, "manifest.json"))
    find.required(with_checkpoint_folder(orchestrator, recipe), manifest.content_sha256)
    return recipe
