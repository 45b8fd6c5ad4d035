"""Tasks of a sweep, on CPUs: draw and plan its points; compare those that succeeded."""

from flytune.stages import table
from tasks.runtime.face import light

draw_points = light(table.DRAW, globals())
compare_points = light(table.COMPARE_POINTS, globals())
