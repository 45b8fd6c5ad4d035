"""A folder as base model that is an artifact is compared with its hashes."""

import pytest

from flytune.errors import ExportError
from flytune.models import base
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


def test_the_plan_reads_no_weights(folder):
    seal(folder)
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert base.local_name(Model(name_or_path=str(folder)), weights=False) == str(folder)


def test_other_folders_and_complete_artifacts_are_used(folder):
    assert base.local_name(Model(name_or_path=str(folder))) == str(folder)
    base._verify.cache_clear()
    assert base.local_name(Model(name_or_path=str(seal(folder)))) == str(folder)
