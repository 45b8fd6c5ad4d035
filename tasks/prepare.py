"""Data preparation on CPUs: the GPU task never tokenizes."""

from flytune.stages import table
from tasks.runtime.face import light

prepare_data = light(table.PREPARE, globals())
