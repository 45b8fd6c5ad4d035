"""Stages of a run: those that have a module of tasks/, and the tasks of the others."""

from flytune.stages import table
from tasks.runtime.face import declare_run

declare_run(table.RUN, globals())
