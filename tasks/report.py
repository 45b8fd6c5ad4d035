"""Task of flytune/stages/report.py."""

from flytune.stages import table
from tasks.runtime.face import light

report_failure = light(table.REPORT, globals())
