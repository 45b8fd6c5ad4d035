"""Adapters whose configuration names other layers than their file has tensors of."""

import json
import shutil

import pytest

from flytune.adapters import loading, merging
from flytune.errors import ExportError
from flytune.models import adapter_files
from tests.support.paths import ROOT
from tests.support.stages import seal

RELEASE = ROOT / "tests/support/releases/0.1.0"
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MISSING = "of no such key"


@pytest.fixture
def base(monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(RELEASE)
    return AutoModelForCausalLM.from_pretrained(RELEASE / "base", dtype="float32")


def changed(folder, **changes):
    """Return the stored adapter with other values in its configuration."""
    made = shutil.copytree(RELEASE / "artifact", folder)
    file = made / "adapter_config.json"
    content = {
        name: value
        for name, value in (json.loads(file.read_text()) | changes).items()
        if value is not MISSING
    }
    file.write_text(json.dumps(content))
    return made


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": None},
        {"target_modules": MISSING},
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj", ""]},
        {"target_modules": ".*(q|v)_proj"},
        {"exclude_modules": ["q_proj"]},
    ],
    ids=str,
)
def test_a_part_of_an_adapter_is_refused(base, changes, tmp_path):
    with pytest.raises(
        ValueError, match=r"of adapter_model.safetensors would not be used: adapter_config.json names no such"
    ):
        adapter_files.put(base, changed(tmp_path / "one", **changes))


def test_what_its_file_lacks_is_named(base, tmp_path):
    with pytest.raises(
        ValueError, match="^Found missing adapter keys: .*: adapter_config.json asks for what"
    ):
        adapter_files.put(base, changed(tmp_path / "one", use_dora=True))


@pytest.mark.parametrize(
    "changes", [{}, {"target_modules": "all-linear"}, {"target_modules": [*LAYERS, "nowhere"]}], ids=str
)
def test_other_names_of_the_same_layers_are_used(base, changes, tmp_path):
    model = adapter_files.put(base, changed(tmp_path / "one", **changes))
    # A second adapter whose name is a part of the layers' names.
    assert set(adapter_files.put(model, changed(tmp_path / "two"), "layers").peft_config) == {
        "default",
        "layers",
    }


def test_merging_and_loading_refuse_it_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(RELEASE)
    artifact = seal(changed(tmp_path / "one", target_modules=None))
    with pytest.raises(ExportError, match="adapter and base base cannot be loaded: .* would not be used"):
        merging.merge(artifact, tmp_path / "merged")
    with pytest.raises(
        ExportError, match="adapter a on base model base: cannot be loaded: .* would not be used"
    ):
        loading.load({"a": artifact})
    unscaled = seal(changed(tmp_path / "two", lora_alpha=MISSING))
    with pytest.raises(ExportError, match="adapter_config.json: 'lora_alpha': missing; PEFT would take 8"):
        loading.load({"a": unscaled})
