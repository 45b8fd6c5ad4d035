"""A folder as base model that is an artifact is compared with its hashes."""

import pytest

from flytune.errors import ExportError, RecipeError
from flytune.models import base, remote
from flytune.recipe import Model
from tests.support.stages import seal


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_changed_artifact_is_no_base_model(folder):
    seal(folder)
    (folder / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(ExportError, match=r"model.safetensors: .* the artifact is incomplete or was changed"):
        base.local_name(Model(name_or_path=str(folder)))


def test_an_adapter_beside_a_base_is_refused_before_it_is_loaded_in_its_place(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(
        RecipeError,
        match=r"adapter_config.json is beside config.json.* move adapter_config.json and adapter_model",
    ):
        base.local_name(Model(name_or_path=str(folder)), weights=False)
    assert "adapter_config.json" not in remote.files_to_fetch(
        [file.name for file in folder.iterdir()], None, False, "x"
    )


def test_the_plan_reads_no_weights(folder):
    seal(folder)
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert base.local_name(Model(name_or_path=str(folder)), weights=False) == str(folder)


def test_other_folders_and_complete_artifacts_are_used(folder):
    assert base.local_name(Model(name_or_path=str(folder))) == str(folder)
    base._verify.cache_clear()
    assert base.local_name(Model(name_or_path=str(seal(folder)))) == str(folder)
