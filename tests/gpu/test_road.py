"""Test of the whole road on a GPU by the commands a user types: a recipe's run, answers of its artifact, its
adapter merged."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from flytune.records import TrainingResult
from tests.support.paths import ROOT
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SHAPE = "a100-80gb-1"
"""A row of shapes.yaml with one GPU; on this machine a run takes the GPU that is there."""


def ran(folder, *command):
    environment = os.environ | {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("pair", ["lora none", "qlora device_map"])
def test_the_commands(pair, tmp_path):
    method, sharding = pair.split()
    changes = {"method": method, "sharding": sharding, "model.dtype": "bfloat16", "hardware.shape": SHAPE}
    changes |= {
        "publish": {"address": str(tmp_path / "store")},
        "checkpoints.save_steps": 2,
        "training.max_steps": 4,
    }
    (tmp_path / "home").mkdir()
    recipe = tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64), changes)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The sum of 1 and"}\n' * 3)
    ran(tmp_path / "home", "flytune", "run", str(tmp_path / "recipe.yaml"))
    (artifact,) = (path.parent for path in (tmp_path / "store").rglob("training.json"))
    result = TrainingResult.read(artifact / "training.json")
    assert result.memory_kind == "GPU memory allocated"
    assert (artifact / "metrics.json").is_file()
    infer = ["pyflyte", "run", "workflows/infer.py", "infer", "--artifact", str(artifact), "--shape", SHAPE]
    ran(
        tmp_path / "home",
        *infer,
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--generation",
        '{"max_new_tokens": 8}',
    )
    (answers,) = (tmp_path / "home").rglob("answers/answers.jsonl")
    assert len([json.loads(line) for line in answers.read_text().splitlines()]) == 3
    ran(tmp_path / "home", "flytune", "merge", str(artifact), "--out", str(tmp_path / "merged"))
    assert Path(tmp_path / "merged" / "model.safetensors").is_file()
    shutil.rmtree(tmp_path / "home")
