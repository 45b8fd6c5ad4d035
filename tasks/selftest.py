"""Self-test on the machines that train: one Flyte task for each row of shapes.yaml.

SELFTEST maps shapes to tasks. A row of several nodes is a job with one process a node, which starts the
node's ranks.
"""

from flytune.stages import table
from tasks.runtime.face import on_shapes
from tasks.runtime.ranks import of_shape

SELFTEST = on_shapes(table.SELFTEST, globals(), of_shape)
