"""Limits of what a person writes, in recipes and in the files of hardware."""

import pytest
from pydantic import BaseModel

from flytune.errors import RecipeError
from flytune.hardware import load_cluster, load_shapes
from flytune.recipe import Recipe
from tests.support.recipes import content

ROW = (
    "{name: a, accelerator: H100, processes: 8, gpu_memory_gib: 80, cpu: 8, memory_gib: 64, "
    "shared_memory_gib: 8, "
)
ROW += "disk_gib: 100, price_per_hour: 1}"


def numbers(model, at=()):
    """Return the paths of all numeric fields of a recipe."""
    for name, value in model:
        if isinstance(value, BaseModel):
            yield from numbers(value, (*at, name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*at, name)


DEFAULTS = Recipe.model_validate(content())


@pytest.mark.parametrize("path", list(numbers(DEFAULTS)), ids=".".join)
@pytest.mark.parametrize(
    "value", [10**30, 1e300, "1e400", float("inf"), float("nan"), True, -(10**30)], ids=str
)
def test_every_number_of_a_recipe_has_an_end(path, value):
    written = DEFAULTS.model_dump()
    if path[0] == "method":
        written["method"]["name"] = "lora"
    if path[0] == "objective":
        written["objective"]["name"] = "dpo"
    written[path[0]][path[1]] = value
    with pytest.raises(RecipeError, match=rf"{path[0]}\.{path[1]}"):
        Recipe.model_validate(written)


@pytest.mark.parametrize(
    "text", ["\x00", "a\x1b[31mb", "x" * 5000, "/" + "y" * 300, "~nobody/x", "", "\ud800"]
)
@pytest.mark.parametrize(
    "field", ["model.name_or_path", "data.path", "checkpoints.folder", "publish.address"]
)
def test_paths_that_no_system_has_are_mistakes(field, text):
    section, name = field.split(".")
    with pytest.raises(RecipeError, match=field) as error:
        Recipe.model_validate(content() | {section: {name: text}})
    str(error.value).encode()


def test_a_recipe_that_is_nested_without_end_is_refused():
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RecipeError, match="nested deeper than 100"):
        Recipe.model_validate(content(data=deep))


def test_a_micro_batch_of_a_million_millions_is_refused():
    with pytest.raises(RecipeError, match=r"per_device_train_batch_size: must be 65,536 or less"):
        Recipe.model_validate(
            content(
                training={
                    "learning_rate": 1e-4,
                    "global_batch_size": 8,
                    "per_device_train_batch_size": 10**12,
                }
            )
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("gpu_memory_gib: 0", "an H100 has memory"),
        ("gpu_memory_gib: .inf", "numbers must be finite; found inf"),
        ("gpu_memory_gib: .nan", "numbers must be finite"),
        ("processes: true", "processes: must be an integer; found true"),
        ("processes: 0", "processes: must be 1 or greater"),
        ("shared_memory_gib: 64", "it is a part of memory_gib, 64"),
        ("price_per_hour: -1", "price_per_hour: must be 0 or greater"),
        ("memory_gib: 1e30", "memory_gib"),
        ('accelerator: "\\x1b"', "control character"),
    ],
)
def test_rows_of_shapes_that_no_machine_has(change, said, tmp_path):
    file, key = tmp_path / "shapes.yaml", change.partition(":")[0]
    kept = ", ".join(part for part in ROW.strip("{}").split(", ") if not part.startswith(f"{key}:"))
    file.write_text(f"- {{{kept}, {change}}}\n")
    with pytest.raises(RecipeError, match=said):
        load_shapes(file)


def test_numbers_of_a_cluster(tmp_path):
    (tmp_path / "cluster.yaml").write_text("node_start_minutes: true\nstore_read_gbs: .inf\n")
    with pytest.raises(
        RecipeError, match=r"(?s)node_start_minutes: must be a number; found true.*store_read_gbs: "
    ):
        load_cluster(tmp_path / "cluster.yaml")
