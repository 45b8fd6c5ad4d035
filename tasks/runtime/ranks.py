"""Jobs of ranks: declared as flytekit's Elastic, whose launcher starts none. The stage's call does, in each
pod of the job.

flytekit's launcher calls a killed rank, a lost peer and most exceptions final, and takes a SIGTERM for
success without outputs.
"""

from typing import Any

from flytekit import PythonFunctionTask
from flytekit.extend import TaskPlugins
from flytekitplugins.kfpytorch import CleanPodPolicy, Elastic, RunPolicy
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

from flytune.hardware import Shape


class RanksOfNodes(Elastic):
    """Elastic of a task that starts its ranks itself."""


class RanksTask(PytorchElasticFunctionTask):
    """Task of a job, whose function starts the ranks of a node."""

    def __init__(self, task_config: RanksOfNodes, task_function: Any, **arguments: Any) -> None:
        """Declare the task as the plugin does, but without torch, which the plugin imports to read the number
        of nodes."""
        kind = self._ELASTIC_TASK_TYPE_STANDALONE if task_config.nnodes == 1 else self._ELASTIC_TASK_TYPE
        # The plugin's task_type_version.
        common = {"task_type": kind, "task_type_version": 1}
        super(PytorchElasticFunctionTask, self).__init__(task_config, task_function, **common, **arguments)
        self.min_nodes = self.max_nodes = int(task_config.nnodes)
        self.rdzv_backend = "c10d"

    def execute(self, **inputs: Any) -> Any:
        """Run the task's function in this process."""
        return PythonFunctionTask.execute(self, **inputs)


TaskPlugins.register_pythontask_plugin(RanksOfNodes, RanksTask)


def of_shape(shape: Shape, processes: int) -> RanksOfNodes:
    """Return the configuration of one job over the shape's nodes, with `processes` ranks a node."""
    return RanksOfNodes(
        nnodes=shape.nodes,
        nproc_per_node=processes,
        # The pod template mounts /dev/shm; Elastic's own mount would be a second one.
        increase_shared_mem=False,
        # Without it, the operator keeps the peers of a lost pod waiting on their GPUs while the next attempt
        # runs.
        run_policy=RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING),
    )
