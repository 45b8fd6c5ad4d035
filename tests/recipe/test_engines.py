"""The section of the engine that draws answers: its short form, its key, and what is refused of it."""

from pathlib import Path

import pytest

from flytune.errors import RecipeError
from flytune.objectives import objective_of
from flytune.planning import candidates, planner
from flytune.recipe import Recipe
from tests.support.tiny import tiny_base, tiny_recipe

VLLM = {"name": "vllm"}


def recipe_of(engine, objective=None, **changes):
    section = {"name": "grpo", "max_completion_length": 12, "engine": engine} | (objective or {})
    content = tiny_recipe(Path("/of/base"), Path("/rows.jsonl"), {"objective": section, **changes})
    return Recipe.model_validate(content)


def test_the_short_form_is_the_section_and_the_default_is_in_no_key():
    assert recipe_of("vllm") == recipe_of(VLLM)
    assert Recipe.model_validate_json(recipe_of("vllm").model_dump_json()) == recipe_of("vllm")
    default = Recipe.model_validate(
        tiny_recipe(
            Path("/of/base"),
            Path("/rows.jsonl"),
            {"objective": {"name": "grpo", "max_completion_length": 12}},
        )
    )
    assert recipe_of("transformers").key() == default.key() != recipe_of("vllm").key()
    assert default.key() == KEY_BEFORE


KEY_BEFORE = "2839e65ab8d2e270"
"""Key of that recipe before there were engines."""


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("sglang", "engine.name: must be 'transformers' or 'vllm'"),
        ({"address": "https://a"}, "engine: name the engine: vllm or transformers"),
        ({"name": "transformers", "python": "/a"}, "engine.python: unknown key"),
        (VLLM | {"python": "vllm"}, "engine.python"),
        (VLLM | {"address": "vllm:8000"}, "no address of a server"),
        (VLLM | {"address": "ftp://a"}, "no address of a server"),
        (VLLM | {"address": "http://vllm.default.svc:8000", "folder": "/w"}, "would be readable on the way"),
        (VLLM | {"address": "http://127.0.0.1.example.org", "folder": "/w"}, "would be readable on the way"),
        (VLLM | {"address": "https://me:my-password@a", "folder": "/w"}, "address with credentials"),
        (VLLM | {"address": "https://a"}, "folder: a server outside of the pod reads the weights"),
        (VLLM | {"address": "https://a", "folder": "s3://b/c"}, "vLLM reads weights from a file system"),
        (VLLM | {"address": "http://localhost:1", "python": "/a"}, "python: of a server that the run starts"),
        (VLLM | {"address": "http://localhost:1", "gpus": 1}, "gpus: of a server that the run starts"),
        (VLLM | {"vllm_importance_sampling_clip_max": 0.5}, "vllm_importance_sampling_clip_max"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(engine, said):
    with pytest.raises(RecipeError, match=said) as refused:
        recipe_of(engine)
    assert "my-password" not in str(refused.value)


def test_objectives_that_draw_nothing_have_no_engine():
    with pytest.raises(RecipeError, match="engine: only for name: grpo, and this is dpo"):
        Recipe.model_validate(
            tiny_recipe(Path("/b"), Path("/r"), {"objective": {"name": "dpo", "engine": "vllm"}})
        )


@pytest.mark.parametrize(
    ("objective", "changes", "said"),
    [
        ({}, {"method": "qlora", "model.dtype": "bfloat16"}, "with method qlora: the server has the base"),
        ({}, {"method": {"name": "lora", "use_dora": True}}, "vLLM loads no DoRA"),
        ({}, {"method": {"name": "lora", "experts": True}}, "method.experts: not tested"),
        ({}, {"method": {"name": "lora", "r": 513}}, "with rank 513: vLLM loads adapters of up to 512"),
        (
            {},
            {"method": {"name": "lora", "alpha_pattern": {"q_proj": 4}}},
            "method.alpha_pattern: vLLM has one scale for all layers of an adapter",
        ),
        (
            {},
            {"method": {"name": "lora", "rank_pattern": {"q_proj": 4}}},
            "method.rank_pattern: vLLM has one",
        ),
        ({"temperature": 0.7, "top_p": 0.9}, {}, "temperature: 0.7 beside top_p, top_k or min_p"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(objective, changes, said):
    refused = candidates.contradictions(recipe_of("vllm", objective, **changes))
    assert [line for line in refused if line.startswith("objective.engine: vllm") and said in line]
    own = candidates.contradictions(recipe_of("transformers", objective, **changes))
    assert not [line for line in own if "engine" in line]


def test_types_of_models_without_code_in_vllm_are_refused(tmp_path):
    geometry = planner.read_geometry(Recipe.model_validate(tiny_recipe(tiny_base(tmp_path), tmp_path)).model)
    assert not objective_of(recipe_of("vllm")).base_problems(geometry)
    other = geometry.model_copy(update={"model_type": "olmo2"})
    said = objective_of(recipe_of("vllm")).base_problems(other)
    assert [line for line in said if "vllm with model type olmo2: vLLM 0.32.0 has no code of its own" in line]
    assert not objective_of(recipe_of("transformers")).base_problems(other)
