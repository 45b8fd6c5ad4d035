"""Train: one Flyte task for each row of shapes.yaml, declared with that row's machines.

A row with several processes is an Elastic (torchrun) task that judges its failures (tasks/runtime/attempts.py); on one node it
has a second task of one process, without Elastic, for device_map. TRAIN maps routes to tasks.
"""

from typing import Any

from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch import CleanPodPolicy, RunPolicy

from flytune.artifacts.publish.checkpoints import StepPublisher
from flytune.failures.table import RETRIES
from flytune.hardware import devices
from flytune.hardware.cluster import load_cluster
from flytune.hardware.shapes import Shape, load_shapes, shape_named
from flytune.recipe.recipe import Recipe
from flytune.records.plan import Plan
from flytune.sharding import ONE_PROCESS
from flytune.training import loop
from images import TRAIN as IMAGE
from tasks.runtime.attempts import Ranks, told
from tasks.runtime.directories import fetch, fresh, placed, unpack
from tasks.runtime.pods import declare, rendezvous
from tasks.runtime.secrets import secrets


def train(
    recipe: Recipe, plan: Plan, dataset: FlyteDirectory, base: FlyteDirectory | None = None, export_only: bool = False
) -> FlyteDirectory:
    """Trains and exports; returns model/ or adapter/ with training.json. Runs in every process.

    Without `base` the base model is read as on a laptop; `export_only` exports the newest complete checkpoint as it is.
    """
    out = fresh("trained")
    with told():
        devices.check(shape := shape_named(plan.shape))
        unpack(base)
        loop.fit(placed(recipe), plan, shape, fetch(dataset), out, export_only, StepPublisher)
    return FlyteDirectory(str(out))


def ranks(shape: Shape, processes: int) -> Ranks:
    """Return the shape's nodes as one job of torchrun, with so many processes a node."""
    return Ranks(
        nnodes=shape.nodes,
        nproc_per_node=processes,
        monitor_interval=1,
        rdzv_configs=rendezvous(load_cluster()),
        # The pod template mounts /dev/shm; Elastic's own mount would be a second one.
        increase_shared_mem=False,
        # Once one pod is lost, the operator would let the others wait for it, on their GPUs, beside the next attempt's.
        run_policy=RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING),
    )


TRAIN: dict[str, Any] = {}
for _shape in load_shapes():
    _common = {"container_image": IMAGE, "retries": RETRIES, "secret_requests": secrets("tracking")}
    if _shape.world_size > 1:
        TRAIN[_shape.name] = declare(
            train, f"train_{_shape.identifier}", _shape, globals(), task_config=ranks(_shape, _shape.processes), **_common
        )
    if _shape.nodes == 1 and (_shape.is_gpu or _shape.processes == 1):
        _route = _shape.name + (ONE_PROCESS if _shape.processes > 1 else "")
        TRAIN[_route] = declare(train, f"train_{_route.replace('-', '_')}", _shape, globals(), **_common)
