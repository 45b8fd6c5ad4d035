"""Data of upstream tasks: named by content in the recipe, cached, and trained on."""

import json
from collections import OrderedDict
from pathlib import Path

import pandas
import pytest
from flytekit import FlyteContextManager, task, workflow
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.tools.translator import get_serializable
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from flytekit.types.structured import StructuredDataset

from flytune import data
from flytune.errors import DataError
from flytune.recipe import Recipe
from flytune.records import Manifest
from flytune.stages.input_data import ORIGIN
from tasks.input_data import name_dataset, name_file, name_folder
from tests.support.registration import SETTINGS
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs
from workflows.upstream import finetune_on_dataset, finetune_on_file, finetune_on_folder


@pytest.fixture
def recipe(tmp_path, local_cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    provider = FileAccessProvider(str(tmp_path / "local"), str(tmp_path / "raw"))
    with FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(provider)):
        yield Recipe.model_validate(tiny_recipe(tiny_base(tmp_path), "upstream://"))


@task
def rows_as_dataset(count: int) -> StructuredDataset:
    """Return rows as another workflow's task does."""
    rows = [{"prompt": f"Add {index} and 1.", "completion": f"It is {index + 1}."} for index in range(count)]
    return StructuredDataset(dataframe=pandas.DataFrame(rows))


@workflow
def named_dataset(recipe: Recipe, count: int) -> Recipe:
    return name_dataset(recipe=recipe, data=rows_as_dataset(count=count))


@workflow
def trained_on_dataset(recipe: Recipe, count: int) -> FlyteDirectory:
    return finetune_on_dataset(recipe=recipe, data=rows_as_dataset(count=count))


def test_a_file_is_named_by_its_content_wherever_it_is(recipe, tmp_path):
    first, second = (
        write_pairs(tmp_path / "a" / "pairs.jsonl", 8),
        write_pairs(tmp_path / "b" / "pairs.jsonl", 8),
    )
    named = name_file(recipe=recipe, data=FlyteFile(str(first)))
    assert named == name_file(recipe=recipe, data=FlyteFile(str(second)))
    assert Path(named.data.path).read_bytes() == first.read_bytes()
    assert named.key() == name_file(recipe=recipe, data=FlyteFile(str(second))).key()
    assert json.loads((Path(named.data.path).parent / ORIGIN).read_text()) == {
        "address": str(first),
        "execution": "",
    }
    write_pairs(second, 9)
    other = name_file(recipe=recipe, data=FlyteFile(str(second)))
    assert other.data.path != named.data.path
    assert data.fingerprint(other.data) != data.fingerprint(named.data)


def test_a_folder_keeps_its_files_and_the_record_of_its_origin_is_no_data(recipe, tmp_path):
    write_pairs(tmp_path / "rows" / "a.jsonl", 4)
    write_pairs(tmp_path / "rows" / "b.jsonl", 5)
    named = name_folder(recipe=recipe, data=FlyteDirectory(str(tmp_path / "rows")))
    assert sorted(path.name for path in Path(named.data.path).iterdir()) == [ORIGIN, "a.jsonl", "b.jsonl"]
    before = data.fingerprint(named.data)
    (Path(named.data.path) / ORIGIN).write_text("{}")
    assert data.fingerprint(named.data) == before


def test_a_dataset_is_read_as_parquet_and_its_rows_decide_its_address(recipe):
    named = named_dataset(recipe=recipe, count=6)
    assert named.data.path.endswith(".parquet")
    assert pandas.read_parquet(named.data.path)["completion"].tolist()[0] == "It is 1."
    assert named_dataset(recipe=recipe, count=6) == named
    assert named_dataset(recipe=recipe, count=7) != named


def test_a_recipe_of_several_sources_is_refused(recipe, tmp_path):
    several = recipe.model_dump() | {"data": {"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}}
    with pytest.raises(
        DataError, match=r"data\.sources: several sources, and one input; write data\.path: upstream://"
    ):
        name_file(
            recipe=Recipe.model_validate(several), data=FlyteFile(str(write_pairs(tmp_path / "x.jsonl", 2)))
        )


@pytest.mark.slow
def test_a_data_frame_of_another_task_is_trained_on(recipe):
    artifact = Path(trained_on_dataset(recipe=recipe, count=64).path)
    assert Manifest.read(artifact / "manifest.json").rows == 64
    stored = Recipe.from_yaml(artifact / "recipe.yaml")
    assert stored.data.path.endswith(".parquet")


@pytest.mark.parametrize(
    "made", [finetune_on_file, finetune_on_folder, finetune_on_dataset], ids=lambda made: made.name
)
def test_the_workflows_are_registered_with_finetune_inside(made):
    spec = get_serializable(OrderedDict(), SETTINGS, made)
    assert list(spec.template.interface.inputs) == ["recipe", "data"]
    assert len(spec.template.nodes) == 2
    assert spec.template.nodes[1].workflow_node.sub_workflow_ref.name == "workflows.finetune.finetune"
