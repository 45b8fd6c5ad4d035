"""Plan of a run, made on a CPU: a recipe that cannot fit or cannot be read is refused before a GPU is
requested."""

from flytune.stages import table
from tasks.runtime.face import light

make_plan = light(table.PLAN, globals())
