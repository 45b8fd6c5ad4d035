"""Training: one Flyte task for each row of shapes.yaml, declared with that row's machines.

A row with several processes is an Elastic (torchrun) task that classifies failures (tasks/runtime/elastic.py); on one node it
has a second task of one process, without Elastic, for device_map. TRAIN maps routes to tasks.
"""

import os
from pathlib import Path
from typing import Any

from flytekit.types.directory import FlyteDirectory

from flytune.artifacts.publish.checkpoints import StepPublisher
from flytune.failures.table import RETRIES
from flytune.hardware import devices, load_shapes, shape_named
from flytune.recipe import Recipe
from flytune.records import Plan
from flytune.sharding import ONE_PROCESS
from flytune.training import loop
from images import TRAIN as IMAGE
from tasks.runtime import forked_ranks
from tasks.runtime.directories import fetch, is_local, new_folder, unpack_base_model, with_checkpoint_folder
from tasks.runtime.elastic import ranks
from tasks.runtime.pods import declare
from tasks.runtime.retries import report_failures
from tasks.runtime.secrets import secrets


def train(
    recipe: Recipe,
    plan: Plan,
    dataset: FlyteDirectory,
    base: FlyteDirectory | None = None,
    export_only: bool = False,
    references: list[FlyteDirectory] | None = None,
) -> FlyteDirectory:
    """Train and export in every process; return model/ or adapter/ with training.json.

    Without `base` the base model is read as on a laptop; `export_only` exports the newest complete checkpoint as it is;
    `references` has the log-probabilities of the reference model, or nothing.
    """
    out = new_folder() / "trained"
    with report_failures():
        devices.check(shape := shape_named(plan.shape))
        if is_local() and "RANK" not in os.environ:
            forked_ranks.prepare(_fetch, recipe, plan, dataset=dataset, base=base)
        known = fetch(references[0]) if references else None
        loop.fit(with_checkpoint_folder(recipe), plan, shape, _fetch(dataset, base), out, export_only, StepPublisher, known)
    return FlyteDirectory(str(out))


def _fetch(dataset: FlyteDirectory, base: FlyteDirectory | None = None, **others: Any) -> Path:
    """Bring the inputs to this node, once for all its processes; return the folder of the data set."""
    unpack_base_model(base)
    return fetch(dataset)


TRAIN: dict[str, Any] = {}
for _shape in load_shapes():
    _common = {"container_image": IMAGE, "retries": RETRIES, "secret_requests": secrets("tracking")}
    if _shape.world_size > 1:
        TRAIN[_shape.name] = declare(
            train,
            f"train_{_shape.identifier}",
            _shape,
            globals(),
            task_config=ranks(_shape, _shape.processes, _fetch),
            **_common,
        )
    if _shape.nodes == 1 and (_shape.is_gpu or _shape.processes == 1):
        _route = _shape.name + (ONE_PROCESS if _shape.processes > 1 else "")
        TRAIN[_route] = declare(train, f"train_{_route.replace('-', '_')}", _shape, globals(), **_common)
