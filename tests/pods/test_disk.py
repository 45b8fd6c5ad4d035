"""Tests of the disk of pods without a GPU."""

from flytune.pods import disk
from tests.support.stages import recipe_for


def test_more_prepared_data_than_the_disk_holds_is_a_line_of_the_plan(tmp_path):
    recipe = recipe_for(tmp_path, "lora", **{"data.max_length": 4096})
    assert disk.shortage(recipe, None) is None
    assert disk.shortage(recipe, 1_000_000) is None
    found = disk.shortage(recipe, 2_000_000)
    assert found is not None
    assert (
        "prepare_data stores up to 61 GiB (2,000,000 samples of 4,096 tokens), and its pod has 32 GiB of disk"
        in found
    )
