"""Tests that this release reads recipes, artifacts and checkpoints of earlier ones. See
tests/support/releases/*/README.md."""

import json
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flytune import data
from flytune.adapters import loading, merging
from flytune.artifacts import build, catalog, fetch
from flytune.data import heldout_rows
from flytune.export import gate
from flytune.hardware import shape_named
from flytune.models import probe
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.records import Comparison, Export, Manifest, Metrics, Plan, Step, TrainingResult
from flytune.records.comparison import COMPARISON
from flytune.records.contents import stored_file
from flytune.registry import compare, history, refresh
from flytune.training import loop
from flytune.training.checkpoints import find
from tests.support import ranks
from tests.support.paths import ROOT

RELEASES = ROOT / "tests/support/releases"
LATER = "99.0.0"
"""Version that the code is set to, so that each stored version is an earlier one."""

pytestmark = pytest.mark.parametrize("release", sorted(path.name for path in RELEASES.glob("*.*.*")))


@pytest.fixture
def place(release, tmp_path, monkeypatch):
    """A copy of the release's folder as the working directory, because its paths are relative."""
    shutil.copytree(RELEASES / release, tmp_path / "release")
    monkeypatch.chdir(tmp_path / "release")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "flytune" and hasattr(module, "__version__"):
            monkeypatch.setattr(module, "__version__", LATER)
    return tmp_path / "release"


def missing(expected, found, where="recipe"):
    """Return the parts of `expected` that `found` lacks or has with other values; `found` may have additional
    fields."""
    if isinstance(expected, dict) and isinstance(found, dict):
        lost = [f"{where}.{key}: missing" for key in expected.keys() - found.keys()]
        shared = expected.keys() & found.keys()
        return lost + [
            line for key in sorted(shared) for line in missing(expected[key], found[key], f"{where}.{key}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for index, (old, new) in pairs for line in missing(old, new, f"{where}[{index}]")]
    return [] if expected == found else [f"{where}: {found!r}, and {expected!r} was written"]


def test_every_field_of_a_recipe_keeps_its_name_and_value(place):
    expected = json.loads(Path("recipe.json").read_text())
    recipe = Recipe.from_yaml("recipe.yaml")
    assert missing(expected, recipe.model_dump(mode="json")) == []
    assert Recipe.model_validate(expected) == recipe, "as Flyte passes it from task to task"


def test_the_files_of_an_artifact_are_read_with_their_meaning(place):
    folder = Path("artifact")
    plan, manifest = Plan.read(folder / "plan.json"), Manifest.read(folder / "manifest.json")
    result = TrainingResult.read(folder / "training.json")
    assert (plan.verdict, plan.world_size, plan.global_batch_size) == ("fits", 1, 4)
    assert (manifest.source, manifest.rows) == ("data.jsonl", 48)
    assert [step.step for step in result.steps] == [1, 2, 3, 4]
    assert [
        Step.model_validate_json(line) for line in (folder / "steps.jsonl").read_text().splitlines()
    ] == result.steps
    assert Metrics.read(folder / "metrics.json").loss_difference < 0
    assert Export.read(folder / "export.json").base == "base"
    assert Comparison.read(folder / COMPARISON).shape == "cpu-1"
    recipe = Recipe.from_yaml(folder / "recipe.yaml")
    assert plan.key == recipe.key(), (
        "a key that changes is another run: its checkpoints and its decisions are not found"
    )
    contents = build.Contents.read(folder / build.CONTENTS)
    assert [stored_file(folder / file.file, file.file) for file in contents.files] == contents.files
    assert {file.file for file in contents.files} >= {
        "report.html",
        "README.md",
        "adapter_model.safetensors",
        probe.PROBE,
    }


def test_an_artifact_is_listed_and_fetched(place, release):
    import fsspec

    (entry,) = catalog.list_artifacts("artifact")
    assert entry.problems == []
    assert (entry.kind, entry.base, entry.method, entry.rows) == ("adapter", "base", "lora", 48)
    assert entry.tuned_perplexity < entry.base_perplexity
    fsspec.filesystem("memory").put("artifact/", f"/{release}/artifact/", recursive=True)
    fetch.fetch(f"memory://{release}/artifact", Path("fetched"))
    assert {path.name for path in Path("fetched").iterdir()} == {
        path.name for path in Path("artifact").iterdir()
    }


def test_an_adapter_is_loaded_and_answers_as_the_trained_model(place):
    recipe = Recipe.from_yaml("artifact/recipe.yaml")
    assert gate.check_files(recipe, Path("artifact"), Path("dataset")) == Path("artifact")
    model = gate.check(
        recipe,
        Path("artifact"),
        Path("dataset"),
        heldout_rows(Path("dataset"), 8),
        lambda: loading.load({"old": "artifact"}),
    )
    live = probe.Answers.read(Path("artifact", probe.PROBE))
    logits = probe.ask(model, live.prompts).logits
    # Other CPUs sum in another order.
    assert torch.allclose(logits, live.logits, atol=1e-5)
    with model.disable_adapter():
        assert not torch.allclose(probe.ask(model, live.prompts).logits, live.logits, atol=1e-5)


def test_an_adapter_is_merged(place):
    made = merging.merge(Path("artifact"), Path("merged"))
    assert made.candidates[0].agreement == 1.0
    assert made.candidates[0].divergence < 1e-7


def test_an_artifact_is_accepted_as_champion(place, untrained):
    recipe = Recipe.from_yaml("artifact/recipe.yaml")
    metrics = Metrics.read(Path("artifact/metrics.json"))
    compared = compare.compare_with_base(metrics)
    decided = refresh.decision_on(recipe, data.fingerprint(recipe.data), "artifact", compared, [])
    decision = history.record(str(place / "accepted"), decided, expected=None)
    assert decision.outcome == "accepted"
    assert history.current(history.decisions_at(str(place / "accepted"))) == decision
    comparison = compare.compare_artifacts(recipe, Path("artifact"), Path("dataset"), decision.artifact)
    assert comparison.difference == 0
    assert comparison.challenger == pytest.approx(metrics.tuned.loss, abs=1e-5)


def fit(recipe, out):
    """Train, and return the result and Flytune's warnings."""
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("flytune").addHandler(handler)
    plan = planner.make(recipe)
    result = loop.fit(recipe, plan, shape_named(plan.shape), Path("dataset"), out)
    return result, warnings


def changed(recipe, **changes):
    """Return the recipe with changes to its checkpoints section."""
    return recipe.model_copy(update={"checkpoints": recipe.checkpoints.model_copy(update=changes)})


def checkpoint():
    (manifest,) = Path("checkpoint").glob("*/2-*/manifest.json")
    return json.loads(manifest.read_text())


def test_data_is_prepared_as_before(place):
    recipe = Recipe.from_yaml("recipe-train.yaml")
    data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), Path("again"))
    old, new = data.read_manifest(Path("dataset")), data.read_manifest(Path("again"))
    assert new.content_sha256 == old.content_sha256
    assert new.tokenizer_sha256 == old.tokenizer_sha256


def test_a_killed_run_resumes_from_its_checkpoint(place, release):
    recipe = Recipe.from_yaml("recipe-train.yaml")
    old = checkpoint()
    assert old["flytune"] == release
    found = find.required(recipe, data.read_manifest(Path("dataset")).content_sha256)
    assert (found.checkpoint.step, found.checkpoint.decisions) == (2, old["decisions"])
    saved = load_file(next(Path("checkpoint").glob("*/2-*/model.safetensors")))

    # Nothing was saved there: it starts from the beginning.
    straight, _ = ranks.run(1, fit, changed(recipe, folder="elsewhere"), Path("straight"))
    resumed, warnings = ranks.run(1, fit, recipe, Path("resumed"))
    assert warnings == [f"the checkpoint of step 2: written by flytune {release}, this is {LATER}"]
    assert (straight.resumed_from_step, [step.step for step in straight.steps]) == (0, [1, 2, 3, 4])
    assert (resumed.resumed_from_step, [step.step for step in resumed.steps]) == (2, [1, 2, 3, 4])
    assert [step.loss for step in resumed.steps] == pytest.approx(
        [step.loss for step in straight.steps], abs=1e-5
    )
    # The checkpoint is of a release without records of attempts.
    assert (resumed.attempts[0].last_step, resumed.repeated_steps) == (2, 0)
    assert resumed.seconds >= resumed.step_seconds
    ends = [load_file(place / name / "model" / "model.safetensors") for name in ("straight", "resumed")]
    # Steps 1 and 2 of the checkpoint were computed by another CPU; the learning rate, and so a step, is 1e-3.
    assert far(*ends) < 1e-5
    assert far(saved, ends[0]) > 1e-4, "steps 3 and 4 have moved the weights by more than the bound"


def test_a_checkpoint_is_found_by_name_whatever_the_recipe_s_key(place, release):
    recipe = Recipe.from_yaml("recipe-train.yaml")
    Path("checkpoint", checkpoint()["decisions"]).rename(Path("checkpoint", "by-name"))
    resumed, warnings = ranks.run(1, fit, changed(recipe, name="by-name"), Path("resumed"))
    assert resumed.resumed_from_step == 2
    assert warnings == [
        f"the checkpoint of step 2: written by flytune {release}, this is {LATER}",
        "the checkpoint of step 2: written with another recipe or other data; this run's hold from step 3 on",
    ]


def far(weights, others):
    """Return the largest difference of two models' weights."""
    assert weights.keys() == others.keys()
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)
