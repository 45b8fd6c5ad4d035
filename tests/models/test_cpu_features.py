"""Exports made on one kind of CPU pass the gate on another: libraries choose their kernels by what a CPU has.

`OLD_CPU` makes this machine's libraries use the kernels of a CPU with AVX2 alone. On such a CPU the two sides
are the same.
"""

import json
import os
import subprocess
import sys

import pytest

from flytune import data
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.training import loop
from tests.numerical import CPUS
from tests.support import ranks
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

# oneDNN's kernels are those that differ most: bfloat16 products by AMX and AVX512-BF16 on new CPUs.
OLD_CPU = CPUS["avx2"]
CHECK = """
import sys
from pathlib import Path
from flytune.data.shards import heldout_rows
from flytune.export import gate
from flytune.models import loading
from flytune.recipe.recipe import Recipe
loading.import_libraries()
recipe, dataset, trained = Recipe.from_yaml(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
rows = heldout_rows(dataset, 8)
def model():
    return loading.exported_model(recipe, trained, device_map={"": "cpu"})
gate.check(recipe, trained, dataset, rows, model)
print("passed")
"""


def fit(recipe, dataset, out):
    plan = planner.make(recipe)
    loop.fit(recipe, plan, shape_named(plan.shape), dataset, out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "dtype"), [("full", "float32"), ("full", "bfloat16"), ("qlora", "bfloat16")]
)
def test_an_export_passes_the_gate_on_an_older_cpu(method, dtype, tmp_path):
    sharding = "device_map" if method == "qlora" else "none"
    changes = {"method": method, "sharding": sharding, "model.dtype": dtype}
    content = tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64), changes)
    recipe = Recipe.model_validate(content)
    data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), tmp_path / "dataset")
    ranks.run(1, fit, recipe, tmp_path / "dataset", tmp_path / "out")
    (tmp_path / "recipe.yaml").write_text(json.dumps(content))
    paths = [str(tmp_path / name) for name in ("recipe.yaml", "dataset", "out")]
    command = [sys.executable, "-c", CHECK, *paths]
    done = subprocess.run(command, env=os.environ | OLD_CPU, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "passed", done.stderr[-2000:]
