"""Champion and challenger, compared on one node of the shape that evaluates; promotion and rollback on a CPU.

COMPARE maps shapes to tasks.
"""

from flytune.stages import table
from tasks.runtime.face import light, on_shapes

COMPARE = on_shapes(table.COMPARE_MODELS, globals())
promote_challenger = light(table.PROMOTE, globals())
rollback_accepted = light(table.ROLLBACK, globals())
