"""Training: one Flyte task for each row of shapes.yaml, declared with that row's machines. TRAIN maps routes
to tasks."""

from flytune.stages import table
from tasks.runtime.face import on_shapes
from tasks.runtime.ranks import of_shape

TRAIN = on_shapes(table.TRAIN, globals(), of_shape)
