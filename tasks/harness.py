"""Benchmarks of lm-evaluation-harness in parts, one pod each, on the shape of the recipe or of the plan.

EVALUATE_TASKS maps shapes to tasks that are mapped over the jobs; without jobs no pod is requested.
"""

from flytune.stages import table
from tasks.runtime.face import light, on_shapes

EVALUATE_TASKS = on_shapes(table.HARNESS, globals())
combine_tasks = light(table.COMBINE, globals())
