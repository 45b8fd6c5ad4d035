"""Report of a failed run: the cause, the advice, and the checkpoint from which it can resume."""

from flytune.stages import table
from tasks.runtime.face import light

report_failure = light(table.REPORT, globals())
