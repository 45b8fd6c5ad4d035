"""Log-probabilities of the reference model of preference tuning, or the tokens of a teacher, computed once
before training."""

from functools import partial

from flytune.models import clean_process
from flytune.stages import base_model
from flytune.stages.orchestrator import Folder, Orchestrator
from flytune.stages.stored import local
from flytune.training import reference
from flytune.training.reference import ReferenceRequest


def reference_log_probs(
    orchestrator: Orchestrator, request: ReferenceRequest, dataset: Folder, base: Folder
) -> Folder:
    """Store the results of a frozen model on all rows; cached by the content of data, model and adapter."""
    out = orchestrator.new_folder() / "reference"
    base_model.unpack(orchestrator, base)
    compute = partial(reference.compute, in_pod=not orchestrator.is_local())
    clean_process.run(compute, request.recipe, local(orchestrator, dataset), out)
    return Folder.here(out)
