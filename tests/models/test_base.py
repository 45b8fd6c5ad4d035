"""Base models: an artifact is compared with its hashes, and an adapter beside a model is refused."""

import pytest
from huggingface_hub import constants

from flytune.errors import ExportError, RecipeError
from flytune.models import base, config_json, remote
from flytune.planning import base_sizes
from flytune.recipe import Model, read_recipe
from tests.support import model_hub
from tests.support.json_server import look_at
from tests.support.paths import ROOT
from tests.support.stages import seal

PINNED = read_recipe(ROOT / "recipes" / "qwen3-1.7b-full.yaml").model
"""Base whose sizes Flytune has."""


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


@pytest.fixture
def of_hub(tmp_path, monkeypatch):
    """Model of the hub in a cache of this machine, which has an adapter beside its config.json; the hub does
    not answer."""
    snapshot = tmp_path / base.cached_name(PINNED.name_or_path) / "snapshots" / PINNED.revision
    snapshot.mkdir(parents=True)
    for name in ("config.json", "adapter_config.json"):
        (snapshot / name).write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(base, "hub_answers", lambda: False)
    return PINNED


@pytest.mark.parametrize("use", [base.local_name, base_sizes.read_geometry])
def test_an_adapter_beside_a_base_of_the_hub_is_refused_where_it_is_planned_without_its_files_too(
    use, of_hub
):
    with pytest.raises(RecipeError, match=r"adapter_config.json is beside config.json .* name the folder"):
        use(of_hub)


def test_the_plan_asks_the_hub_for_an_adapter_beside_the_config(folder, tmp_path, monkeypatch):
    (folder / "adapter_config.json").write_text("{}")
    with model_hub.serving(folder) as hub:
        look_at(monkeypatch, hub.address, tmp_path / "cache")
        with pytest.raises(RecipeError, match="adapter_config.json is beside config.json"):
            config_json.config_file(Model(name_or_path=model_hub.NAME))


def test_the_plan_reads_no_weights(folder):
    seal(folder)
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert base.local_name(Model(name_or_path=str(folder)), weights=False) == str(folder)


def test_other_folders_and_complete_artifacts_are_used(folder):
    assert base.local_name(Model(name_or_path=str(folder))) == str(folder)
    base._verify.cache_clear()
    assert base.local_name(Model(name_or_path=str(seal(folder)))) == str(folder)
