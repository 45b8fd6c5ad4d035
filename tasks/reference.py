"""Log-probabilities of the reference model of preference tuning: a Flyte task for each row of shapes.yaml, on one node.

REFERENCE maps shapes to tasks that are mapped over the plan's requests; where a step runs the reference, there are none.
"""

from typing import Any

from flytekit import Cache
from flytekit.types.directory import FlyteDirectory

from flytune.failures.table import RETRIES
from flytune.hardware import load_shapes
from flytune.models import clean_process
from flytune.training import reference
from flytune.training.reference import ReferenceRequest
from images import TRAIN as IMAGE
from tasks.runtime.directories import fetch, new_folder, unpack_base_model
from tasks.runtime.pods import declare
from tasks.runtime.retries import classify_failures, record_phase

# Raise it when the same request would store other numbers.
CACHE_VERSION = "1"


def reference_log_probs(request: ReferenceRequest, dataset: FlyteDirectory, base: FlyteDirectory) -> FlyteDirectory:
    """Store the reference's log-probabilities of all pairs; cached by the content of data, base model and adapter."""
    out = new_folder() / "reference"
    with classify_failures(), record_phase("reference"):
        unpack_base_model(base)
        clean_process.run(reference.compute, request.recipe, fetch(dataset), out)
    return FlyteDirectory(str(out))


REFERENCE: dict[str, Any] = {
    shape.name: declare(
        reference_log_probs,
        f"reference_log_probs_{shape.identifier}",
        shape.one_node,
        globals(),
        container_image=IMAGE,
        retries=RETRIES,
        cache=Cache(version=CACHE_VERSION, ignored_inputs=("dataset", "base")),
    )
    for shape in load_shapes()
}
