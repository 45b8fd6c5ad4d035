"""Folders of somebody's artifacts with links, pipes and subfolders: what is used is what was checked."""

import json
import os
import shutil

import pytest

from flytune.adapters import combining, loading, merging
from flytune.artifacts import opening
from flytune.errors import ExportError, RecipeError
from flytune.models import base
from flytune.models import loading as models_loading
from flytune.recipe import Model
from flytune.records.contents import CONTENTS
from tests.support.spoiled import change
from tests.support.stages import seal


def files_in(file):
    return json.loads(file.read_bytes())["files"]


@pytest.mark.parametrize("user", ["merge", "combine"])
def test_export_json_names_no_file_that_artifact_json_does_not(artifact, tmp_path, user):
    export, listed = artifact / "export.json", artifact / CONTENTS
    change(export, files=[*files_in(export), {"file": "notes", "size": 4, "sha256": "0" * 64}])
    (artifact / "notes").write_text("keep")
    seal(artifact)
    change(listed, files=[file for file in files_in(listed) if file["file"] != "notes"])
    with pytest.raises(
        ExportError, match=r"'notes': listed in export.json, but not one of the artifact's files, by artifact"
    ):
        if user == "merge":
            merging.merge(artifact, tmp_path / "out")
        combining.combine([artifact, artifact], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["notes", "additional_chat_templates", "adapter", "steps.log"])
def test_no_link_leads_out_of_an_artifact(artifact, tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    (artifact / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match=f"the name '{name}' is a link that leads out of artifact"):
        opening.open_artifact(artifact)
    (artifact / name).unlink()
    (artifact / name).symlink_to("README.md")
    opening.open_artifact(artifact)


def test_an_artifacts_weights_are_those_at_its_root(artifact):
    shutil.copytree(artifact, artifact.with_name("other"))
    (artifact.with_name("other")).rename(artifact / "adapter")
    change(artifact / "adapter" / "adapter_config.json", target_modules="(.*)*x")
    seal(artifact)
    assert models_loading.weights_folder(artifact) == artifact
    assert loading.load({"one": artifact}) is not None


def test_an_adapter_without_a_rank_has_pefts(artifact, tmp_path):
    import numpy
    from safetensors.numpy import load_file, save_file

    config = json.loads((artifact / "adapter_config.json").read_bytes())
    del config["r"]
    (artifact / "adapter_config.json").write_text(json.dumps(config))
    found = load_file(artifact / "adapter_model.safetensors")
    wider = {
        name: numpy.concatenate([value] * 4, axis=0 if "lora_A" in name else 1)
        for name, value in found.items()
    }
    save_file(wider, artifact / "adapter_model.safetensors", {"format": "pt"})
    seal(artifact)
    made = combining.combine([artifact, artifact], tmp_path / "out")
    assert [source.r for source in made.sources] == [8, 8]
    assert made.r == 16


def test_a_pipe_among_further_chat_templates_is_refused(artifact, tmp_path):
    folder = tmp_path / "base" / "additional_chat_templates"
    folder.mkdir()
    os.mkfifo(folder / "x.jinja")
    with pytest.raises(RecipeError, match="x.jinja: a named pipe"):
        base.local_name(Model(name_or_path=str(tmp_path / "base")))
