"""Adapters on experts: counted as training makes them, and refused by name where there can be none."""

import json

import pytest

from flytune.models.experts import fused
from flytune.planning import candidates, workloads
from tests.support.counted_models import adapters, built
from tests.support.model_types import MODEL_TYPES, NOT_BUILT, tiny_config
from tests.support.plans import recipe_of
from training_estimates import counting


def problems(kind, **method):
    found = counting.count(json.loads(tiny_config(kind).to_json_string()), None, kind)
    return workloads.adapter_problems(recipe_of(method={"name": "lora", "experts": True} | method), found)


@pytest.mark.filterwarnings("ignore:The following rank_pattern")
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "jetmoe"])
def test_adapters_of_experts_are_counted_as_training_makes_them(kind):
    planned, true = adapters(kind, "all-linear", experts=True)
    assert planned == true
    assert true > adapters(kind, "all-linear")[1]
    one = "output_linear.weight" if kind == "jetmoe" else "experts.down_proj"
    ranked = adapters(kind, "all-linear", experts=True, rank_pattern={one: 2})
    assert ranked[0] == ranked[1] < true
    if kind != "jetmoe":  # all-linear has one name there
        named = adapters(kind, ["o_proj"], experts=True)
        assert named[0] == named[1] < true


@pytest.mark.slow
def test_those_of_every_type_with_experts_are():
    kinds = [kind for kind in MODEL_TYPES if kind not in NOT_BUILT and fused(built(tiny_config(kind)))]
    assert len(kinds) >= 57
    counts = {kind: adapters(kind, "all-linear", experts=True) for kind in kinds}
    assert {kind: count for kind, count in counts.items() if count[0] != count[1]} == {}


@pytest.mark.parametrize(
    ("kind", "method", "said"),
    [
        ("llama", {}, "method.experts: llama has no routed experts; leave it out"),
        ("dbrx", {}, "method.experts: dbrx: PEFT's layer around its experts hides"),
        (
            "mixtral",
            {"rank_pattern": {"gate_up": 8}},
            "rank_pattern: gate_up: no linear layer of mixtral has such a name",
        ),
        ("mixtral", {"rank_pattern": {"gate_up_proj|upp": 8}}, "upp in it"),
        (
            "mixtral",
            {"rank_pattern": {"experts.gate_up_pro": 8}},
            "did you mean gate_up_proj? it has q_proj, ",
        ),
        ("mixtral", {"rank_pattern": {"experts.w1": 8}}, "o_proj, experts.down_proj, experts.gate_up_proj"),
        (
            "qwen3_moe",
            {"target_modules": ["gate"]},
            "which is not a layer, and gate is their router; name layers",
        ),
        (
            "qwen2_moe",
            {"target_modules": ["gate_up_proj"], "experts": False},
            "write method.experts: true for adapters on them",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(kind, method, said):
    assert said in problems(kind, **method)[0]


def test_a_pattern_of_experts_matches_nothing_where_experts_have_no_adapter():
    found = counting.count(json.loads(tiny_config("mixtral").to_json_string()), None, "mixtral")
    recipe = recipe_of(method={"name": "lora", "rank_pattern": {"experts.down_proj": 8}})
    assert "rank_pattern: experts.down_proj" in workloads.adapter_problems(recipe, found)[0]


@pytest.mark.parametrize("experts", [False, True])
def test_an_expression_of_one_layer_adapts_no_other(experts):
    planned, true = adapters("qwen3_moe", r".*\.layers\.0\.self_attn\.(q|v)_proj", experts=experts)
    assert planned == true


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_balance_loss_beside_a_reference_is_refused_where_checkpoints_lose_its_gradient(objective):
    found = counting.count(json.loads(tiny_config("qwen3_moe").to_json_string()), None, "qwen3_moe")

    def said(sharding="zero3", **training):
        recipe = recipe_of(method="lora", objective=objective, sharding=sharding)
        given = {"activation_checkpointing": True} | training
        recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update=given)})
        return [
            one
            for one in candidates.impossible(recipe, found)
            if "wrong gradients of the balance loss" in one
        ]

    assert len(said()) == 1
    for without in ({"router_aux_loss_coef": 0.0}, {"activation_checkpointing": False}, {"sharding": "fsdp"}):
        assert said(**without) == []
