"""Evaluation of the exported files: one Flyte task for each row of shapes.yaml, on one of its nodes."""

from flytune.stages import table
from tasks.runtime.face import on_shapes

EVALUATE = on_shapes(table.EVALUATE, globals())
