"""Task of flytune/stages/base_model.py."""

from flytune.stages import table
from tasks.runtime.face import light

fetch_base_model = light(table.BASE_MODEL, globals())
