"""Self-test on the machines that train: one Flyte task for each row of shapes.yaml.

SELFTEST maps shapes to tasks. A row of several nodes is a job with one process a node, which starts the
node's ranks.
"""

from flytune.stages import selftest, table
from tasks.runtime.face_of_ranks import on_all_nodes

SELFTEST = on_all_nodes(table.SELFTEST, globals(), selftest.selftest_nodes)
