"""Training and export, in every process of a shape."""

from pathlib import Path

from flytune.artifacts.publish.checkpoints import StepPublisher
from flytune.hardware import devices, shape_named
from flytune.recipe import Recipe
from flytune.records import Plan
from flytune.stages import base_model
from flytune.stages.orchestrator import Folder, Orchestrator
from flytune.stages.stored import local, with_checkpoint_folder
from flytune.training import loop


def train(
    orchestrator: Orchestrator,
    recipe: Recipe,
    plan: Plan,
    dataset: Folder,
    base: Folder | None = None,
    export_only: bool = False,
    references: list[Folder] | None = None,
) -> Folder:
    """Train and export in every process; return model/ or adapter/ with training.json.

    Without `base` the base model is read as on a laptop; `export_only` exports the newest complete checkpoint
    as it is; `references` has the log-probabilities of the reference model, or nothing.
    """
    out = orchestrator.new_folder() / "trained"
    devices.check(shape := shape_named(plan.shape))
    known = local(orchestrator, references[0]) if references else None
    recipe, files = with_checkpoint_folder(orchestrator, recipe), fetch_inputs(orchestrator, dataset, base)
    loop.fit(recipe, plan, shape, files, out, export_only, StepPublisher, known)
    return Folder.here(out)


def fetch_inputs(orchestrator: Orchestrator, dataset: Folder, base: Folder | None) -> Path:
    """Bring the inputs to this node, once for all its processes; return the folder of the data set."""
    base_model.unpack(orchestrator, base)
    return local(orchestrator, dataset)
