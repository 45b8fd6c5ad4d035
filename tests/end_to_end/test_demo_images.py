"""The road of `make demo-images` in few steps: drawn figures, a model that reads them, its report, and an
answer about one."""

import json
from pathlib import Path

import pytest

from demo import images
from flytune import yaml_core
from flytune.cli import main
from flytune.recipe import Recipe
from flytune.records import Metrics
from flytune.stages import local
from tests.support.paths import ROOT

STEPS, FIGURES = 12, 80


@pytest.mark.journey
def test_a_model_learns_from_drawn_figures_and_answers_about_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLYTUNE_OUT", str(tmp_path / "artifacts"))
    home = tmp_path / ".demo"
    images.write_rows(home / images.ROWS, FIGURES)
    images.make(home)
    content = yaml_core.load((ROOT / images.RECIPE).read_bytes())
    content["training"] |= {"max_steps": STEPS, "warmup_steps": 2}
    content["evaluation"] |= {"sample_answers": 2}
    artifact = Path(local.run(Recipe.model_validate(content)))
    metrics = Metrics.read(artifact / "metrics.json")
    assert metrics.tuned.perplexity < metrics.base.perplexity / 3
    assert (artifact / "report.html").read_text(encoding="utf-8").count('src="data:image/jpeg;base64,') >= 4
    prompts = home / images.ROWS.with_name("prompts.jsonl")
    (question, _) = json.loads((home / images.ROWS).read_text().splitlines()[0])["messages"]
    prompts.write_text(json.dumps({"messages": [question]}) + "\n")
    capsys.readouterr()
    assert main(["infer", str(artifact), "--prompts", str(prompts), "--max-new-tokens", "12"]) == 0
    assert json.loads(capsys.readouterr().out)["answer"]
