"""Plans of models that the closed form does not know: the dry run decides."""

import json
from pathlib import Path

import pytest

from flytune.cli import main, plan
from flytune.dryrun import DryRun, confirm
from flytune.errors import DoesNotFit, RecipeError
from flytune.hardware.shapes import GIB
from flytune.planning import planner
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import Method, Sharding
from tests.support.plans import SMALL, recipe_of

UNKNOWN = "multi-head latent attention (new_type)"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}))
    (data := tmp_path / "rows.jsonl").write_text("")
    for module in (planner, plan):
        monkeypatch.setattr(
            module, "read_geometry", lambda model: read_geometry(model).model_copy(update={"unsupported": UNKNOWN})
        )
    return recipe_of(
        model={"name_or_path": str(tmp_path)},
        sharding="fsdp",
        hardware={"shape": "a10g-8"},
        data={"path": str(data), "max_length": 256},
        training={"learning_rate": 1e-4, "global_batch_size": 128},
    )


def stand_in(monkeypatch, each, base=GIB):
    """Let a dry run need `base` bytes, and `each` for each sample; return the micro batches that are traced."""
    traced = []

    def run(recipe, folder, degrees, micro_batch):
        traced.append(micro_batch)
        size = base + each * micro_batch
        phases = {"load": base, "first step, backward": size, "steady step, backward": size}
        return DryRun(
            phases=phases, kinds={"activations": size}, peak_bytes=size, peak_phase="steady step, backward",
            peak_module="layers.0", largest=[], host_bytes=0, seconds=1.0,
        )  # fmt: skip

    monkeypatch.setattr(confirm.dryrun, "run", run)
    return traced


@pytest.mark.parametrize(("each", "expected", "verdict"), [(0.1, 16, "fits"), (2.5, 4, "fits"), (18.5, 1, "tight")])
def test_the_dry_run_decides_about_a_model_that_the_closed_form_does_not_know(recipe, monkeypatch, each, expected, verdict):
    traced = stand_in(monkeypatch, round(each * GIB))
    plan = planner.make(recipe, trace=confirm.best_fit)
    assert (plan.per_device_train_batch_size, plan.verdict) == (expected, verdict)
    assert plan.memory.engine == "dry run"
    assert len(traced) == len(set(traced)) <= 4
    told = "\n".join(plan.reasons)
    assert "dry run: " in told
    assert "closed form has" not in told
    assert f"the closed form does not know {UNKNOWN}" in told


def test_where_nothing_fits_the_dry_run_says_what_is_missing(recipe, monkeypatch):
    stand_in(monkeypatch, 40 * GIB)
    with pytest.raises(DoesNotFit, match=r"a10g-8: 2\d.\d GiB of GPU memory missing by the dry run, with micro batch 1"):
        planner.make(recipe, trace=confirm.best_fit)


def test_weights_that_do_not_fit_are_not_traced(recipe, monkeypatch):
    traced = stand_in(monkeypatch, GIB)
    file = Path(recipe.model.name_or_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 100_000_000, "hidden_size": 1024}))
    plain = recipe.model_copy(
        update={"hardware": recipe.hardware.model_copy(update={"shape": "a10g-1"}), "sharding": Sharding(name="none")}
    )
    with pytest.raises(DoesNotFit, match=r"a10g-1: .* GiB of .* needed to load, has "):
        planner.make(plain, trace=confirm.best_fit)
    assert traced == []


def test_without_torch_it_is_refused_with_the_way_on(recipe, monkeypatch):
    find = confirm.importlib.util.find_spec
    monkeypatch.setattr(confirm.importlib.util, "find_spec", lambda name: None if name in ("torch", "trl") else find(name))
    with pytest.raises(RecipeError, match=r"does not know multi-head .* needs torch, trl: plan where .*flytune\[train\]"):
        planner.make(recipe, trace=confirm.best_fit)


def test_a_recipe_that_cannot_be_traced_is_refused_with_the_reason(recipe):
    other = recipe.model_copy(update={"sharding": Sharding(name="device_map"), "method": Method(name="qlora")})
    with pytest.raises(RecipeError, match=r"cannot trace this recipe: sharding device_map"):
        planner.make(other, trace=confirm.best_fit)


def test_no_ranking_of_a_model_that_the_closed_form_does_not_know(recipe, tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    assert main(["plan", str(tmp_path / "r.yaml"), "--shape", "auto"]) == 1
    assert "name one shape, about which the dry run decides" in capsys.readouterr().err


def test_the_command_shows_the_dry_runs_plan(recipe, tmp_path, monkeypatch, capsys):
    traced = stand_in(monkeypatch, GIB // 10)
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    assert main(["plan", str(tmp_path / "r.yaml"), "--json", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["needs"][0]["engine"] == "dry run"
    assert len(traced) == len(set(traced))  # not traced again for --dry-run


def test_the_planner_decides_nothing_about_such_a_model_by_itself(recipe):
    with pytest.raises(RecipeError, match=r"does not know multi-head .*; `flytune plan` asks the dry run"):
        planner.make(recipe)
