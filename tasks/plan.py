"""Task of flytune/stages/plan.py."""

from flytune.stages import table
from tasks.runtime.face import light

make_plan = light(table.PLAN, globals())
