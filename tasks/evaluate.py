"""Evaluation of the exported files: one Flyte task for each row of shapes.yaml, on one of its nodes."""

from flytune.stages import table
from tasks.runtime.face import on_nodes

EVALUATE = on_nodes(table.EVALUATE, globals())
