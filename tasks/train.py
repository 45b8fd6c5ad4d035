"""Training: one Flyte task for each row of shapes.yaml, declared with that row's machines. TRAIN maps routes
to tasks."""

from flytune.stages import table
from tasks.runtime.face_of_ranks import on_ranks

TRAIN = on_ranks(table.TRAIN, globals())
