"""Checkpoint of a resumed run, looked up before a GPU is requested."""

from flytune.stages import table
from tasks.runtime.face import light

find_checkpoint = light(table.CHECKPOINT, globals())
