"""Files that a person's recipe names: read once, within limits; and never for the recipe of somebody else."""

import json

import pytest

from flytune.artifacts import lineage
from flytune.cluster import uploads
from flytune.errors import ExportError, RecipeError
from flytune.recipe import Recipe, named_files, read_recipe
from flytune.records.contents import CONTENTS
from flytune.storage import Storage
from flytune.yaml_core import dump
from tests.support import special_files
from tests.support.recipes import content

ZERO3 = {"zero_optimization": {"stage": 3}}
KEY = {
    "type": "service_account",
    "private_key": "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\n",
}


def write(folder, config):
    (folder / "recipe.yaml").write_text(dump(content(sharding={"name": "zero3", "config": config})))
    return folder / "recipe.yaml"


def test_a_persons_recipe_gets_the_content_of_the_file_and_the_key_of_the_content(tmp_path):
    (tmp_path / "my.json").write_text(json.dumps(ZERO3))
    recipe = read_recipe(write(tmp_path, str(tmp_path / "my.json")))
    assert recipe.sharding.config == ZERO3
    assert recipe.key() == Recipe.model_validate(content(sharding={"name": "zero3", "config": ZERO3})).key()
    assert uploads.found(recipe.model_dump() | {"data": {}}) == []


@pytest.mark.parametrize("kind", special_files.KINDS)
def test_only_a_small_regular_file_is_read(kind, tmp_path):
    path = special_files.made(kind, tmp_path / "x.json")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: .*\n  sharding\.config: .*/x\.json: "):
        read_recipe(write(tmp_path, str(path)))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (KEY, "a token"),
        ({"a": {"client_secret": "abcdefgh"}}, "'client_secret' holds a credential"),
        ({"auths": [{"auth": "dXNlcjpwYXNz"}]}, "'auth' holds a credential"),
        ({"nvme_path": "s3://user:hunter22@host/x"}, "a user's name and password"),
    ],
)
def test_a_file_of_credentials_is_not_copied_into_a_recipe(value, said, tmp_path):
    (tmp_path / "key.json").write_text(json.dumps(value))
    with pytest.raises(RecipeError, match=said) as error:
        read_recipe(write(tmp_path, str(tmp_path / "key.json")))
    assert not {"MIIE", "abcdefgh", "dXNlcjpwYXNz", "hunter22"} & set(
        str(error.value).replace("@", " ").split()
    )


def test_all_files_that_cannot_be_read_are_named():
    grid = {
        "sharding.config": ["no.json", None, ZERO3],
        "sharding": [{"name": "zero3", "config": "nor.json"}],
    }
    with pytest.raises(RecipeError, match="2 mistakes") as error:
        named_files.with_contents(grid)
    assert str(error.value).splitlines()[1:] == [
        "  sharding.config[0]: no.json: no such file",
        "  sharding[0].config: nor.json: no such file",
    ]


def test_a_sweeps_changes_get_the_contents_too(tmp_path):
    (tmp_path / "my.json").write_text(json.dumps(ZERO3))
    changes = [{"sharding.config": str(tmp_path / "my.json"), "training.seed": 1}, {"sharding.config": ZERO3}]
    assert [content["sharding.config"] for content in named_files.with_contents(changes)] == [ZERO3, ZERO3]


@pytest.mark.parametrize("path", ["key.json", "http://127.0.0.1:9/x.json", "/dev/zero", "memory://x/y.json"])
def test_a_stored_recipe_that_names_a_file_is_refused_by_each_reader(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key.json").write_text(json.dumps(ZERO3))
    file = write(tmp_path, path)
    said = (
        "names a file, which is read only for a recipe that you give to flytune or pyflyte yourself; "
        "write the content"
    )
    with pytest.raises(RecipeError, match=said):
        Recipe.from_yaml(file)
    with pytest.raises(RecipeError, match=said):
        Recipe.model_validate_json(json.dumps(content(sharding={"name": "zero3", "config": path})))
    (tmp_path / CONTENTS).write_text("{}")
    with pytest.raises(ExportError, match=said):
        lineage.of_artifact(Storage(tmp_path))
