"""Batch inference: prompts are split on a CPU, answered in parts on the named shape, and joined on a CPU.

INFER maps shapes to map tasks over the parts: one for each row of shapes.yaml, on one of its nodes.
"""

from flytune.stages import table
from tasks.runtime.face import light, on_shapes

split_prompts = light(table.SPLIT, globals())
INFER = on_shapes(table.INFER, globals(), per_item="part")
join_answers = light(table.JOIN, globals())
