"""Storage of one artifact, complete or not at all."""

from flytune.stages import table
from tasks.runtime.face import light

store_artifact = light(table.STORE, globals())
