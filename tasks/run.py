"""Stages of a run: those that have a module of tasks/, and the tasks of the others.

TASKS maps the names of the stages to their tasks; those of a stage on shapes to a dict by the shapes.
"""

from flytune.stages import table
from tasks.runtime.face import declare_run

TASKS = declare_run(table.RUN, globals())
