"""Names of adapted layers in a recipe, at plan time and with a loaded model."""

import json

import pytest

from flytune.errors import RecipeError
from flytune.models import adapter_targets
from flytune.planning import workloads
from tests.support.model_types import tiny_config
from tests.support.plans import recipe_of
from training_estimates import counting

WRONG = [
    (
        {"target_modules": ["q_proj", "v_porj"]},
        "target_modules: v_porj: no linear layer of llama has such a name; did you mean v_",
    ),
    ({"target_modules": r".*\.(q_proj|v_porj)"}, r"target_modules: v_porj in .*did you mean v_proj"),
    ({"target_modules": "q_proj"}, r"a regular expression of whole names, .* write \[q_proj\]"),
    ({"target_modules": ["q_proj", "self_attn"]}, "self_attn: no layer, or an expert or a router"),
    ({"target_modules": ["q_proj", "lm_head"]}, "lm_head: the loss reads the head's weight"),
    ({"rank_pattern": {"dwn_proj": 8}}, "rank_pattern: dwn_proj: no linear layer .* did you mean down_proj"),
    ({"alpha_pattern": {"(q|x)_proj": 8}}, "alpha_pattern: .*x in it"),
    (
        {"target_modules": ["q_proj"], "rank_pattern": {"v_proj": 8}},
        "matches model.layers.0.self_attn.v_proj, which has no ada",
    ),
    (
        {"rank_pattern": {".*_proj": 8, "q_proj": 4}},
        "q_proj: a pattern before it has all layers that it matches",
    ),
]


def recipe(method):
    return recipe_of(method={"name": "lora", "r": 4} | method)


@pytest.mark.parametrize(("method", "said"), WRONG)
def test_a_name_or_pattern_of_no_layer_is_refused_at_plan_time_and_at_load(method, said):
    import torch
    from transformers import AutoModelForCausalLM

    found = counting.count(json.loads(tiny_config("llama").to_json_string()), None, "llama")
    with pytest.raises(RecipeError, match=said):
        raise RecipeError.of("r", workloads.adapter_problems(recipe(method), found))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    with pytest.raises(RecipeError, match=said):
        adapter_targets.check(recipe(method), model)


def test_pissa_of_a_rank_above_the_width_is_refused():
    found = counting.count(json.loads(tiny_config("llama").to_json_string()), None, "llama")
    for method in ({"r": 33}, {"rank_pattern": {"k_proj": 33}}):
        method |= {"init_lora_weights": "pissa"}
        assert "has 32 singular values" in workloads.adapter_problems(recipe(method), found)[0]
    assert workloads.adapter_problems(recipe({"r": 33}), found) == []
