"""Heavy modules that commands, registration and pods must not import: each takes seconds before the first
line of work."""

import os
import subprocess
import sys

import pytest

from flytune.recipe import DataRequest, Recipe
from tests.support.paths import ROOT
from tests.support.pods import pod
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

MODELS = {"torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes", "tokenizers"}
TABLES = {"datasets", "pandas", "pyarrow", "numpy", "scipy", "sklearn", "matplotlib"}
FLYTE = {"flytekit", "flyteidl", "grpc", "kubernetes", "docker", "requests", "fsspec", "aiohttp"}
STORES = {"s3fs", "botocore", "gcsfs", "huggingface_hub"}
# Python imports it first; at its exit it writes the names of the modules that were loaded. flytekit's lazy
# modules are in sys.modules before that; to look at one of their attributes would load them. MISSING names
# packages that appear as not installed.
SITE = """
import atexit, os, sys
sys.modules.update(dict.fromkeys(os.environ.get("MISSING", "").split()))
def write():
    lazy = ("_LazyModule", "NoneType")
    loaded = [name for name, module in sys.modules.items() if type(module).__name__ not in lazy]
    with open(os.environ["LOADED"], "a") as file:
        file.write("".join(name + chr(10) for name in loaded))
atexit.register(write)
"""


class Loaded:
    """Variables for a process, and the modules that it and its children have loaded."""

    def __init__(self, folder):
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        self.file = folder / "loaded"
        self.variables = {
            "PYTHONPATH": f"{folder / 'site'}:{ROOT}",
            "LOADED": str(self.file),
            "HF_HUB_OFFLINE": "1",
        }

    def of(self, code):
        """Run Python code."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | self.variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return self.names()

    def names(self):
        """Return the top-level names of the modules."""
        return {name.partition(".")[0] for name in self.file.read_text().split()}


@pytest.fixture
def loaded(tmp_path):
    return Loaded(tmp_path)


def command(*arguments):
    return (
        "from flytune.cli import main\n"
        f"try: assert not main({list(arguments)!r})\n"
        "except SystemExit as end: assert not end.code"
    )


def test_the_site_sees_imports_and_no_lazy_modules(loaded):
    code = "import colorsys; from flytekit.lazy_import.lazy_module import lazy_module; lazy_module('joblib')"
    names = loaded.of(code)
    assert "colorsys" in names
    assert "joblib" not in names


@pytest.mark.parametrize(
    ("arguments", "besides"),
    [
        (["--help"], {"pydantic", "rich", "yaml"}),
        (["plan", "recipes/smollm2-1.7b-lora-ddp.yaml"], set()),
        (["plan", "recipes/llama-3.1-8b-qlora.yaml"], set()),
        (["schema"], set()),
    ],
)
def test_a_command(arguments, besides, loaded):
    assert loaded.of(command(*arguments)) & (MODELS | TABLES | FLYTE | STORES | besides) == set()


def test_the_tasks_of_light_pods(loaded):
    """Kubernetes' client is needed where a task is registered, not where it runs."""
    names = loaded.of(
        "from tasks import base_model, checkpoint, harness, infer, input_data, plan, prepare, report, store"
    )
    assert names & (MODELS | TABLES | STORES | {"kubernetes", "jinja2", "lm_eval"}) == set()


def test_the_tasks_of_shapes_before_they_run(loaded):
    """The process that starts the ranks imports torch's launcher, and nothing else of MODELS; the ranks
    import the rest."""
    assert (
        loaded.of("from tasks import evaluate, selftest, train") & (MODELS | TABLES | STORES | {"lm_eval"})
        == set()
    )


def test_the_execution_of_a_light_pod(loaded, tmp_path):
    from tasks.plan import make_plan

    recipe = Recipe.model_validate(tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 8)))
    planned = pod(make_plan, tmp_path / "pod", seen=loaded.variables, recipe=recipe)
    assert planned["route"] == recipe.hardware.shape
    assert loaded.names() & (MODELS | TABLES | STORES | {"kubernetes", "lm_eval"}) == set()


def test_the_check_of_no_harness_tasks(loaded):
    """A plan pod on a cluster names a folder for the tasks' data, and has none to download."""
    code = (
        "from pathlib import Path; from flytune.evaluation import tasks; from flytune.recipe import Recipe\n"
        "recipe = Recipe.from_yaml('recipes/demo-qlora.yaml')\n"
        "none = recipe.evaluation.model_copy(update={'tasks': [], 'must_not_fall': []})\n"
        "tasks.download(recipe.model_copy(update={'evaluation': none}), Path('/nowhere'))"
    )
    assert loaded.of(code) & (MODELS | TABLES | FLYTE | STORES) == set()


def test_the_execution_of_a_prepare_pod(loaded, tmp_path):
    """The light image has no torch. Only what tokenizes and writes shards is imported."""
    from tasks.prepare import prepare_data

    recipe = Recipe.model_validate(
        tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64))
    )
    request = DataRequest(model=recipe.model, data=recipe.data, fingerprint="0", tokenizer="0")
    seen = loaded.variables | {"MISSING": "torch trl peft accelerate deepspeed bitsandbytes"}
    dataset = pod(
        prepare_data, tmp_path / "pod", seen=seen, request=request, scratch_folder=str(tmp_path / "scratch")
    )
    assert isinstance(dataset, dict), dataset
    assert loaded.names() & (MODELS | TABLES) == {"transformers", "tokenizers", "pyarrow", "numpy"}
    assert loaded.names() & {"kubernetes", "lm_eval"} == set()


def test_registration(loaded):
    """All workflows are imported and serialized."""
    code = (
        "from collections import OrderedDict\n"
        "from flytekit.tools.translator import get_serializable\n"
        "from tests.support.registration import SETTINGS\n"
        "import workflows.finetune, workflows.infer, workflows.parts, workflows.refresh, workflows.sweep\n"
        "get_serializable(OrderedDict(), SETTINGS, workflows.finetune.finetune)\n"
    )
    names = loaded.of(code)
    assert "kubernetes" in names
    assert names & (MODELS | TABLES | STORES | {"lm_eval"}) == set()
