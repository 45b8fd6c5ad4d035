"""Log-probabilities of the reference model of preference tuning: a Flyte task for each row of shapes.yaml, on
one node.

REFERENCE maps shapes to tasks that are mapped over the plan's requests; where a step runs the reference,
there are none.
"""

from flytune.stages import table
from tasks.runtime.face import on_shapes

REFERENCE = on_shapes(table.REFERENCE, globals())
