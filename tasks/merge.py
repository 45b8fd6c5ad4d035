"""The steps between two runs of one lineage: guards of the first, and its model as the base of the second.

MERGE maps shapes, and `none`, to tasks.
"""

from flytune.stages import merge, table
from tasks.runtime.face import light, on_shapes

check_stages = light(table.CHECK_STAGES, globals())
pass_guards = light(table.PASS_GUARDS, globals())
continue_complete = light(table.CONTINUE, globals())
MERGE = {merge.UNMERGED: continue_complete, **on_shapes(table.MERGE, globals())}
