"""Task of flytune/stages/store.py."""

from flytune.stages import table
from tasks.runtime.face import light

store_artifact = light(table.STORE, globals())
