"""Rows of shapes.yaml that are refused."""

import pytest
import yaml

from flytune.errors import RecipeError
from flytune.hardware import load_shapes, shape_named

ROW = {
    "name": "a",
    "accelerator": "cpu",
    "processes": 1,
    "cpu": 1,
    "memory_gib": 4,
    "shared_memory_gib": 1,
    "disk_gib": 9,
}
ROW |= {"price_per_hour": 0}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ROW | {"procesess": 1}], r"shapes\[0\].procesess: unknown key; did you mean processes\?"),
        ([ROW, ROW], "a: each name must be unique"),
        ([ROW | {"network": "efa"}], "network: efa with network_devices: 0; only tcp has none"),
        ([ROW | {"network_devices": 2}], "network: tcp with network_devices: 2; only tcp has none"),
        ([ROW | {"accelerator": "L4"}], "gpu_memory_gib: 0: an L4 has memory; write its GiB"),
        (
            [ROW | {"shared_memory_gib": 4}],
            "shared_memory_gib: 4: it is a part of memory_gib, 4, and must be less",
        ),
    ],
)
def test_shapes_are_read_strictly(rows, said, tmp_path):
    (tmp_path / "shapes.yaml").write_text(yaml.safe_dump(rows))
    with pytest.raises(RecipeError, match=said):
        load_shapes(tmp_path / "shapes.yaml")


def test_a_name_of_no_row_is_answered_with_all():
    with pytest.raises(RecipeError, match="no row x; there are cpu-1"):
        shape_named("x")
