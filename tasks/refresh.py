"""Tasks of flytune/stages/refresh.py."""

from flytune.stages import table
from tasks.runtime.face import light

decide_refresh = light(table.DECIDE, globals())
skip_refresh = light(table.SKIP, globals())
