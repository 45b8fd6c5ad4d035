"""Tests that a GPU computes in float32 what a CPU does, with each objective: the same losses, gradient norms
and answers drawn.

On a GPU, TRL's losses are kernels of Triton (trl.kernels.chunked_logprob), which no CPU runs.
"""

import os

import pytest
import torch

from flytune import data
from flytune.hardware import shape_named, this_machine
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.training import loop
from tests.support import ranks
from tests.support.classified import write_classified
from tests.support.preferences import write_labelled, write_preferences
from tests.support.prompts import section, write_prompts
from tests.support.queries import write_queries
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROWS = {
    "sft": write_pairs,
    "dpo": write_preferences,
    "reward": write_preferences,
    "kto": write_labelled,
    "grpo": write_prompts,
    "classify": write_classified,
    "embed": write_queries,
}
CASES = [
    "full sft",
    "lora sft",
    "full sft packed",
    "full dpo",
    "lora dpo",
    "lora kto",
    "full reward",
    "full classify",
    "full embed",
    "lora embed",
    "full grpo",
    "lora grpo",
]


def steps(recipe, on_gpu, dataset, out):
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    shape = this_machine.row("here") if on_gpu else shape_named("cpu-1")
    recipe = recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={"shape": shape.name})})
    result = loop.fit(recipe, planner.make(recipe, [shape]), shape, dataset, out)
    assert result.memory_kind.startswith("GPU") == on_gpu
    return [
        (step.loss, step.grad_norm, step.reward or 0.0, step.answer_tokens or 0.0) for step in result.steps
    ]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_a_cpu(case, tmp_path):
    method, objective, *packed = case.split()
    changes = {
        "method": method if method == "full" else {"name": method, "lora_dropout": 0.0},
        "data.packing": bool(packed),
    }
    changes |= {
        "objective": section() if objective == "grpo" else {"name": objective},
        "training.max_steps": 4,
    }
    rows = ROWS[objective](tmp_path / "rows.jsonl", 64)
    recipe = Recipe.model_validate(tiny_recipe(tiny_base(tmp_path), rows, changes))
    data.prepare(DataRequest.of(recipe, "x"), tmp_path / "dataset")
    found = [
        ranks.run(1, steps, recipe, on_gpu, tmp_path / "dataset", tmp_path / f"trained {on_gpu}")
        for on_gpu in (False, True)
    ]
    for one, other in zip(*found, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-4), found
