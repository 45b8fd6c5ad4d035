"""DoRA, rsLoRA, PiSSA and patterns of ranks: the export, and the merged model, are the live model, whatever
the sharding."""

import json

import pytest
import torch

from flytune.adapters import combining, merging
from flytune.artifacts import build
from flytune.data import heldout_rows
from flytune.errors import ExportError, RecipeError
from flytune.export import gate
from flytune.models import loading, pissa, scoring
from flytune.planning import planner
from flytune.recipe import Recipe
from tests.support import ranks
from tests.support.reports import metrics
from tests.support.saved_runs import fit
from tests.support.tiny import tiny_recipe

SAME = 1e-5
SLOW = pytest.mark.slow
PATTERNS = {"rank_pattern": {"q_proj": 3, r"layers\.[01]\.mlp\.up_proj": 12}, "alpha_pattern": {"q_proj": 24}}
KINDS = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "patterns": PATTERNS,
    "pissa": {"init_lora_weights": "pissa"},
    "pissa-niter": {"init_lora_weights": "pissa_niter_4"},
    "pissa-rslora-patterns": {"init_lora_weights": "pissa", "use_rslora": True, **PATTERNS},
    "dora-rslora-patterns": {"use_dora": True, "use_rslora": True, **PATTERNS},
}


def recipe_for(inputs, kind, sharding="none", name="lora", **changes):
    method = {"name": name, "lora_dropout": 0.0, "r": 8, "lora_alpha": 16} | (
        KINDS[kind] if isinstance(kind, str) else kind
    )
    changes = {
        "method": method,
        "sharding": sharding,
        "training.learning_rate": 1e-2,
        "training.global_batch_size": 8,
    } | changes
    changes |= {"hardware.shape": "cpu-1" if sharding in ("none", "device_map") else "cpu-2"}
    return Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))


@pytest.fixture(scope="module")
def plain(inputs, tmp_path_factory):
    done = {}

    def run(kind, name="lora"):
        if (kind, name) not in done:
            out = tmp_path_factory.mktemp("run") / "trained"
            recipe = recipe_for(inputs, kind, "none" if name == "lora" else "device_map", name)
            done[kind, name] = recipe, ranks.run(1, fit, recipe, inputs, out), out
        return done[kind, name]

    return run


def checked(recipe, inputs, out, result):
    """Pass the gate, and return its model."""
    rows = heldout_rows(inputs / "dataset", scoring.GATE_SAMPLES)
    model = gate.check(recipe, out, inputs / "dataset", rows, lambda: loading.exported_model(recipe, out))
    assert loss_of(model, inputs) == pytest.approx(result.heldout_loss, abs=SAME)
    return model


def loss_of(model, inputs):
    nll, tokens = scoring.heldout_loss(
        model, heldout_rows(inputs / "dataset", scoring.GATE_SAMPLES), 0, batch_size=4
    )
    return float(nll.sum() / tokens.sum())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_export_and_the_merged_model_are_the_live_model(kind, inputs, plain, tmp_path):
    from transformers import AutoModelForCausalLM

    recipe, result, out = plain(kind)
    assert result.steps[-1].loss < result.steps[0].loss - 0.05
    assert result.trained_parameters == planner.make(recipe).trained_parameters
    checked(recipe, inputs, out, result)
    artifact = build.store(
        recipe, planner.make(recipe), inputs / "dataset", out, metrics(), tmp_path / "artifact"
    )
    assert merging.merge(artifact, tmp_path / "merged").candidates[0].divergence < 1e-8
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loss_of(merged, inputs) == pytest.approx(result.heldout_loss, abs=SAME)
    card = (artifact / "README.md").read_text()
    is_merged_first = recipe.method.use_dora or bool(recipe.method.rank_pattern)
    assert ("Servers take LoRA of one rank" in card) == is_merged_first == ("--max-lora-rank" not in card)
    if kind in ("gaussian", "pissa", "pissa-niter"):
        assert (
            combining.combine([artifact, artifact], tmp_path / "both", [0.5, 0.5]).r
            == 2 * recipe.method.largest_rank
        )
    else:
        with pytest.raises(ExportError, match="which PEFT does not combine correctly"):
            combining.combine([artifact, artifact], tmp_path / "both")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        ("dora-rslora-patterns", "fsdp"),
        ("pissa-rslora-patterns", "zero3"),
        *(pytest.param("dora", name, marks=SLOW) for name in ("ddp", "zero2", "zero3")),
        *(pytest.param("pissa-niter", name, marks=SLOW) for name in ("ddp", "zero1", "zero2")),
        pytest.param("patterns", "fsdp", marks=SLOW),
    ],
)
def test_each_kind_trains_sharded_as_in_one_process(kind, sharding, inputs, plain, tmp_path):
    _, alone, _ = plain(kind)
    recipe = recipe_for(inputs, kind, sharding)
    result = ranks.run(planner.make(recipe).world_size, fit, recipe, inputs, tmp_path / "trained")
    assert [step.loss for step in result.steps] == pytest.approx(
        [step.loss for step in alone.steps], abs=SAME
    )
    checked(recipe, inputs, tmp_path / "trained", result)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["device_map", pytest.param("fsdp", marks=SLOW)])
def test_dora_on_a_4_bit_base(sharding, inputs, tmp_path):
    recipe = recipe_for(inputs, "dora", sharding, "qlora")
    result = ranks.run(planner.make(recipe).world_size, fit, recipe, inputs, tmp_path / "trained")
    checked(recipe, inputs, tmp_path / "trained", result)
    artifact = build.store(
        recipe,
        planner.make(recipe),
        inputs / "dataset",
        tmp_path / "trained",
        metrics(),
        tmp_path / "artifact",
    )
    best = merging.merge(artifact, tmp_path / "merged").candidates[0]
    assert (best.onto, best.divergence < 1e-6) == ("dequantized 4-bit weights", True)


def test_pissa_is_exported_as_lora_of_twice_the_rank(inputs, plain):
    recipe, _, out = plain("pissa-rslora-patterns")
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (config["init_lora_weights"], config["r"], config["lora_alpha"]) == (
        True,
        16,
        pytest.approx(16 * 2**0.5),
    )
    assert config["rank_pattern"]["q_proj"] == 6
    assert recipe.method.largest_rank == 24


def test_joined_factors_are_the_difference_of_the_products():
    draw = torch.Generator().manual_seed(0)
    a, a0 = torch.randn(2, 3, 5, generator=draw)
    b, b0 = torch.randn(2, 4, 3, generator=draw)
    made = pissa.as_lora(
        {"x.lora_A.weight": a, "x.lora_B.weight": b, "y": a}, {"x.lora_A.weight": a0, "x.lora_B.weight": b0}
    )
    assert torch.allclose(made["x.lora_B.weight"] @ made["x.lora_A.weight"], b @ a - b0 @ a0, atol=1e-6)
    assert made["y"] is a


@pytest.mark.parametrize(
    ("method", "name", "sharding", "changes", "said"),
    [
        (
            {"init_lora_weights": "pissa"},
            "qlora",
            "device_map",
            {},
            "singular values out of 16- or 32-bit weights",
        ),
        (
            {"init_lora_weights": "pissa", "use_dora": True},
            "lora",
            "none",
            {},
            "pissa cannot be combined with use_dora",
        ),
        (
            {"init_lora_weights": "pissa", "adapter": "x"},
            "lora",
            "none",
            {},
            "pissa cannot be combined with adapter",
        ),
        ({"init_lora_weights": "loftq"}, "lora", "none", {}, "init_lora_weights"),
        ({"rank_pattern": {"q_(proj": 4}}, "lora", "none", {}, r"'q_\(proj' is not a regular expression"),
        ({"use_dora": True}, "full", "none", {}, "use_dora.*: only for lora and qlora"),
        (
            {"init_lora_weights": "pissa"},
            "lora",
            "fsdp",
            {},
            "each process reads only its slices of them; use ddp or zero3",
        ),
        (
            {"use_dora": True},
            "qlora",
            "zero3",
            {},
            "DeepSpeed cannot gather quantized ones; use fsdp, or method lora",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_plan_time(method, name, sharding, changes, said, inputs):
    with pytest.raises(RecipeError, match=said):
        planner.make(recipe_for(inputs, method, sharding, name, **changes))
