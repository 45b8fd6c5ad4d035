"""Decision of a scheduled refresh, on a CPU: train on the window's data, or skip."""

from flytune.stages import table
from tasks.runtime.face import light

decide_refresh = light(table.DECIDE, globals())
skip_refresh = light(table.SKIP, globals())
