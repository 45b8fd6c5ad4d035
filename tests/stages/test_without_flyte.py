"""Test of stages with another orchestrator than Flyte, where flytekit is not installed."""

import subprocess
import sys

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

CODE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("flytekit", "flytekitplugins", "flyteidl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from pathlib import Path
from flytune.models import base
from flytune.recipe import DataRequest, Recipe
from flytune.stages import evaluate, plan, prepare, store, train
from tests.support.plain_orchestrator import PlainOrchestrator

flow, shown = PlainOrchestrator(Path(sys.argv[2])), []
recipe = Recipe.from_yaml(Path(sys.argv[1]))
planned, harness_data = plan.make_plan(flow, shown.append, recipe)
tokenizer = base.tokenizer_identity(recipe.model)
assert planned.request == DataRequest.of(recipe, planned.request.fingerprint, tokenizer=tokenizer)
dataset = prepare.prepare_data(flow, planned.request, planned.scratch_folder)
trained = train.train(flow, recipe, planned.plan, dataset)
metrics = evaluate.evaluate_model(flow, recipe, trained, dataset)
made = store.store_artifact(flow, shown.append, recipe, planned.plan, dataset, trained, metrics, [], harness_data)
assert (made.path / "report.html").is_file() and "tuned_perplexity" in made.facts
print(len(shown), made.partitions["recipe"])
"""


@pytest.mark.slow
def test_a_run_of_its_stages_one_after_the_other(tmp_path):
    recipe = tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64), {"training.max_steps": 2})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-c", CODE, tmp_path / "recipe.yaml", tmp_path / "flow"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "2 tiny"
