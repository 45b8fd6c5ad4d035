"""Plans that the dry run confirms, and those of models that the closed form does not know: it decides about
them."""

import json
from pathlib import Path

import pytest

from flytune.cli import main, plan
from flytune.dryrun import DryRun, confirm
from flytune.errors import DoesNotFit, RecipeError
from flytune.hardware.shapes import GIB
from flytune.models import config_json
from flytune.planning import planner
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import Method, Sharding
from flytune.records.plan import EVALUATE, STEP
from tests.support.chats import tokenizer_folder
from tests.support.plans import SMALL, recipe_of

UNKNOWN = "multi-head latent attention (new_type)"


@pytest.fixture
def known(tmp_path):
    """The recipe of a model that the closed form knows."""
    (tmp_path / "config.json").write_text(
        json.dumps(SMALL | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"})
    )
    # The command reads the first rows as the preparation does.
    tokenizer_folder(tmp_path)
    (data := tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"text": "row {row}"}}\n' for row in range(20_000))
    )
    return recipe_of(
        model={"name_or_path": str(tmp_path)},
        sharding="fsdp",
        hardware={"shape": "a10g-8"},
        data={"path": str(data), "max_length": 256},
        training={"learning_rate": 1e-4, "global_batch_size": 128},
    )


@pytest.fixture
def recipe(known, monkeypatch):
    for module in (planner, plan):
        monkeypatch.setattr(
            module,
            "read_geometry",
            lambda model: read_geometry(model).model_copy(update={"unsupported": UNKNOWN}),
        )
    return known


def changed(recipe, **sections):
    """Return the recipe with some fields of some sections changed."""
    content = recipe.model_dump(exclude_defaults=True)
    return recipe_of(**content | {name: content.get(name, {}) | fields for name, fields in sections.items()})


def stand_in(monkeypatch, each, base=GIB):
    """Let a dry run need `base` bytes, and `each` for each sample; return the micro batches that are
    traced."""
    traced = []

    def run(recipe, folder, degrees, micro_batch):
        traced.append(micro_batch)
        size = base + each * micro_batch
        phases = {"load": base, "first step, backward": size, "steady step, backward": size}
        return DryRun(
            phases=phases,
            kinds={"activations": size},
            peak_bytes=size,
            peak_phase="steady step, backward",
            peak_module="layers.0",
            largest=[],
            host_bytes=0,
            seconds=1.0,
        )

    monkeypatch.setattr(confirm.dryrun, "run", run)
    return traced


@pytest.mark.parametrize(
    ("each", "expected", "verdict"), [(0.1, 16, "fits"), (2.5, 4, "fits"), (18.5, 1, "tight")]
)
def test_the_dry_run_decides_about_a_model_that_the_closed_form_does_not_know(
    recipe, monkeypatch, each, expected, verdict
):
    traced = stand_in(monkeypatch, round(each * GIB))
    plan = planner.make(recipe, trace=confirm.best_fit)
    assert (plan.per_device_train_batch_size, plan.verdict) == (expected, verdict)
    assert plan.memory.engine == "dry run"
    assert len(traced) == len(set(traced)) <= 4
    told = "\n".join(plan.reasons)
    assert "dry run: " in told
    assert "closed form has" not in told
    assert f"the closed form does not know {UNKNOWN}" in told


def test_what_loading_holds_beside_the_weights_is_kept(known, monkeypatch):
    recipe = changed(known, method={"name": "qlora"})
    stand_in(monkeypatch, 0, base=0)
    made = planner.make(recipe)
    assert made.memory.phases["load"]["loading"] > 0
    assert (
        confirm.confirmed(recipe, made).memory.phases["load"]["loading"]
        == made.memory.phases["load"]["loading"]
    )


def test_the_vectors_of_a_step_are_beside_the_traced_micro_batch(known, monkeypatch):
    objective = {"name": "embed"}
    recipe = changed(known, objective=objective, training={"global_batch_size": 2**16})
    stand_in(monkeypatch, 0, base=0)
    made = confirm.confirmed(recipe, planner.make(recipe))
    own = 2**16 // 8 * 2 * SMALL["hidden_size"] * 4
    assert made.memory.phases[EVALUATE]["vectors"] == own
    assert made.memory.phases[STEP]["vectors"] > 7 * 8 * own


def test_where_nothing_fits_the_dry_run_says_what_is_missing(recipe, monkeypatch):
    stand_in(monkeypatch, 40 * GIB)
    with pytest.raises(
        DoesNotFit, match=r"a10g-8: 2\d.\d GiB of GPU memory missing by the dry run, with micro batch 1"
    ):
        planner.make(recipe, trace=confirm.best_fit)


def test_weights_that_do_not_fit_are_not_traced(recipe, monkeypatch):
    traced = stand_in(monkeypatch, GIB)
    file = Path(recipe.model.name_or_path) / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"vocab_size": 100_000_000, "hidden_size": 1024})
    )
    plain = recipe.model_copy(
        update={
            "hardware": recipe.hardware.model_copy(update={"shape": "a10g-1"}),
            "sharding": Sharding(name="none"),
        }
    )
    with pytest.raises(DoesNotFit, match=r"a10g-1: .* GiB of .* needed to load, has "):
        planner.make(plain, trace=confirm.best_fit)
    assert traced == []


def test_without_torch_it_is_refused_with_the_way_on(recipe, monkeypatch):
    find = confirm.importlib.util.find_spec
    monkeypatch.setattr(
        confirm.importlib.util, "find_spec", lambda name: None if name in ("torch", "trl") else find(name)
    )
    with pytest.raises(
        RecipeError, match=r"does not know multi-head .* needs torch, trl: plan where .*flytune\[train\]"
    ):
        planner.make(recipe, trace=confirm.best_fit)


def test_a_recipe_that_cannot_be_traced_is_refused_with_the_reason(recipe):
    other = recipe.model_copy(
        update={"sharding": Sharding(name="device_map"), "method": Method(name="qlora")}
    )
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


@pytest.mark.slow
def test_the_dry_run_confirms_a_plan(known):
    recipe = changed(known, training={"global_batch_size": 8, "torch_compile": True})
    found = confirm.confirmed(recipe, planner.make(recipe))
    assert found.reasons[-1].startswith("dry run: ")
    assert found.reasons[-1].endswith("; torch_compile is left out: the trace has the layers as written")
    assert [need.engine for need in found.needs] == ["dry run", *["closed form"] * 3]
    assert {"CUDA context", "NCCL", "parameters", "optimizer states"} <= set(found.memory.phases[STEP])
    assert found.verdict == "fits"


def test_the_dry_run_of_a_model_whose_sizes_are_shipped_needs_no_network(monkeypatch):
    name, configs = "meta-llama/Llama-3.1-405B", []
    recipe = recipe_of(
        model={"name_or_path": name, "revision": config_json.shipped()[name]["revision"]},
        sharding={"name": "fsdp", "offload": "cpu"},
        training={"learning_rate": 1e-4, "global_batch_size": 64},
        hardware={"shape": "h100-8x8"},
    )

    class Asked(Exception):
        """The end of the stand-in for the dry run."""

    def run(recipe, folder, degrees, micro_batch):
        configs.append(json.loads((folder / "config.json").read_text()))
        raise Asked

    monkeypatch.setattr(confirm.dryrun, "run", run)
    monkeypatch.delattr(confirm, "config_file")
    with pytest.raises(Asked):
        confirm.confirmed(recipe, planner.make(recipe))
    assert configs == [config_json.shipped()[name]["config"]]


def test_what_has_no_dry_run_says_why(known, tmp_path, capsys):
    recipe = changed(known, method={"name": "qlora"}, sharding={"name": "device_map"})
    with pytest.raises(RecipeError, match="no dry run: sharding device_map does not run on fake tensors"):
        confirm.confirmed(recipe, planner.make(recipe))
    on_cpu = changed(known, sharding={"name": "none"}, hardware={"shape": "cpu-1"})
    with pytest.raises(RecipeError, match="--dry-run: cpu-1 has no GPU"):
        confirm.confirmed(on_cpu, planner.make(on_cpu))
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    assert main(["plan", str(tmp_path / "r.yaml"), "--dry-run"]) == 1
    assert "no dry run" in capsys.readouterr().err


def test_a_plan_that_the_dry_run_refuses_takes_fewer_samples(known, monkeypatch):
    traced = stand_in(monkeypatch, 15 * GIB)
    recipe = changed(known, training={"global_batch_size": 32})
    found = confirm.confirmed(recipe, planner.make(recipe))
    assert traced == [4, 2, 1]
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == (1, 4)
