"""Task of flytune/stages/checkpoint.py."""

from flytune.stages import table
from tasks.runtime.face import light

find_checkpoint = light(table.CHECKPOINT, globals())
