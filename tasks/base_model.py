"""Base model: downloaded once from the hub into the cluster's storage or model cache, on a CPU; GPUs do not
wait for a hub."""

from flytune.stages import table
from tasks.runtime.face import light

fetch_base_model = light(table.BASE_MODEL, globals())
