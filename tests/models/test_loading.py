"""Imported libraries, and base models whose files lack weights."""

import shutil
import subprocess
import sys

import pytest

from flytune.models import loading
from flytune.recipe import Recipe
from tests.support.paths import ROOT
from tests.support.tiny import tiny_base, tiny_recipe

LACKS = (
    "has no values for model.layers.0.mlp.up_proj.weight, model.norm.weight: they are random; check "
    "that its files are of"
)


@pytest.fixture(scope="module")
def lacking(tmp_path_factory):
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("bases")
    path = shutil.copytree(tiny_base(folder), folder / "lacking") / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"], weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    return path.parent


def load(base, tmp_path, caplog, capfd, **changes):
    recipe = Recipe.model_validate(tiny_recipe(base, tmp_path / "x.jsonl", changes))
    loading.base_model(recipe, "float32")
    shown = capfd.readouterr()
    assert "LOAD REPORT" not in shown.out + shown.err
    return [record.message for record in caplog.records if record.name == "flytune.models.loading"]


def test_weights_that_are_in_no_file_are_named_in_one_line(lacking, tmp_path, caplog, capfd):
    (said,) = load(lacking, tmp_path, caplog, capfd)
    assert said.startswith(f"model.name_or_path: {lacking} {LACKS}")


def test_tied_weights_and_a_drawn_head_are_not_missing(tmp_path, caplog, capfd):
    base = tiny_base(tmp_path)
    assert load(base, tmp_path, caplog, capfd) == []
    assert load(base, tmp_path, caplog, capfd, objective="reward", method="lora") == []


def test_a_function_that_a_library_compiles_is_compiled_at_its_first_call(monkeypatch):
    import torch

    compiled = []
    monkeypatch.setattr(
        torch, "compile", lambda function=None, **options: compiled.append((function, options)) or function
    )
    before = torch.compile

    def double(number):
        """Double it."""
        return 2 * number

    with loading.importing():
        later = torch.compile(double, dynamic=False)
        assert torch.compile(layer := torch.nn.Identity()) is layer
    assert torch.compile is before
    assert compiled == [(layer, {})]
    assert (later.__name__, later.__doc__) == ("double", "Double it.")
    assert [later(1), later(2)] == [2, 4]
    assert compiled == [(layer, {}), (double, {"dynamic": False})]


@pytest.mark.slow
def test_training_imports_no_compiler():
    code = (
        "import sys\nfrom flytune.training import libraries\nlibraries.import_before_fork(False, ['sft'])\n"
    )
    code += "print('bitsandbytes' in sys.modules, 'torch._inductor.compile_fx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True False"
