"""Stages in several processes as Flyte 2's tasks: a PyTorchJob, or one pod, whose ranks flytune.stages.ranks
starts.

Not the plugin's Elastic: it imports torch where a task is declared, retries all failures but a
NonRecoverableError, which it hides in a RuntimeError, and starts no ranks in a local run. Flyte's backend
makes a job of the same configuration.
"""

from dataclasses import dataclass
from typing import Any

from flyte.extend import AsyncFunctionTaskTemplate, TaskPluginRegistry
from flyteidl2.plugins.kubeflow.common_pb2 import CLEANPOD_POLICY_RUNNING, RunPolicy
from flyteidl2.plugins.kubeflow.pytorch_pb2 import (
    DistributedPyTorchTrainingReplicaSpec,
    DistributedPyTorchTrainingTask,
    ElasticConfig,
)
from google.protobuf.json_format import MessageToDict


@dataclass(frozen=True)
class RanksOfJob:
    """Configuration of one job."""

    nodes: int
    processes: int
    """Processes of a node."""


@dataclass(kw_only=True)
class JobTask(AsyncFunctionTaskTemplate[Any, Any, Any]):
    """Task of one job: its function starts the ranks of a node."""

    plugin_config: RanksOfJob
    debuggable: bool = False

    def __post_init__(self) -> None:
        """Choose the plugin of the backend: the training operator's for several nodes, a pod of its own for
        one."""
        super().__post_init__()  # type: ignore[no-untyped-call]
        if self.plugin_config.nodes > 1:
            self.task_type, self.task_type_version = "pytorch", 1

    def custom_config(self, sctx: Any) -> dict[str, Any]:
        """Return the job of several nodes, as the backend's plugin reads it; nothing for one node."""
        config = self.plugin_config
        if config.nodes == 1:
            return {}
        job = DistributedPyTorchTrainingTask(
            worker_replicas=DistributedPyTorchTrainingReplicaSpec(replicas=config.nodes),
            # Without it, the operator keeps the peers of a lost pod waiting on their GPUs while the next
            # attempt runs.
            run_policy=RunPolicy(clean_pod_policy=CLEANPOD_POLICY_RUNNING),
            elastic_config=ElasticConfig(
                rdzv_backend="c10d",
                min_replicas=config.nodes,
                max_replicas=config.nodes,
                nproc_per_node=config.processes,
                max_restarts=0,
            ),
        )
        return dict(MessageToDict(job))


TaskPluginRegistry.register(config_type=RanksOfJob, plugin=JobTask)
