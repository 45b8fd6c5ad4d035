"""Environment of the tasks that call stages: they wait, and need no more than the SDK."""

import flyte

from flyte2.runtime import images, pods
from flyte2.stages import ENVIRONMENTS
from flytune.stages.table import Resources

driver = flyte.TaskEnvironment(
    name="flytune",
    image=images.light(),
    pod_template=pods.light(Resources(1, 2)),
    depends_on=ENVIRONMENTS,
)
