"""Disk that the pods without a GPU request, in GiB, and what it holds."""

from flytune.hardware.shapes import GIB
from flytune.recipe import Recipe
from flytune.sentences import counted

FETCH_BASE_GIB = 24
"""Disk of fetch_base_model: one file of the base model's weights at a time."""
PREPARE_GIB = 32
"""Disk of prepare_data: the prepared samples. Rows are streamed."""
STORE_GIB = 16
"""Disk of store_artifact: the artifact's small files, and one exported file of weights (5 GB) if it publishes
to the hub."""
_TOKEN = 8
"""Bytes of a prepared token: two 32-bit numbers, its id and its label, without the compression of parquet."""


def shortage(recipe: Recipe, samples: int | None) -> str | None:
    """Return why the disk of prepare_data may not suffice; None if it does, or if the number of samples is
    unknown."""
    need = (samples or 0) * recipe.data.max_length * _TOKEN / GIB
    if need <= PREPARE_GIB:
        return None
    return (
        f"prepare_data stores up to {need:,.0f} GiB ({counted(samples or 0, 'sample')} of "
        f"{counted(recipe.data.max_length, 'token')}), and its pod has "
        f"{PREPARE_GIB} GiB of disk: if the samples are that long, raise PREPARE_GIB in flytune/pods/disk.py"
    )
