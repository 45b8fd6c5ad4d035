"""The closed form beside the dry run: GPU memory of one step, whatever the method, and with and without
checkpointing."""

import json

import pytest

from flytune.dryrun import Case, trace
from flytune.hardware import shape_named
from flytune.planning import workloads
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import Recipe
from flytune.records.plan import DRAW
from tests.support import ranks
from tests.support.plans import LLAMA_8B
from tests.support.tiny import tiny_recipe
from training_estimates.degrees import Degrees
from training_estimates.memory import memory

SIZES = {"num_hidden_layers": 12, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
SIZES |= {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000}
NOT_TRACED = ("cuBLAS", "CUDA context", "NCCL", "fragmentation")
CASES = [("full", "none", "sft"), ("lora", "none", "sft"), ("qlora", "none", "sft"), ("lora", "fsdp", "sft")]
CASES += [
    ("full", "none", "dpo"),
    ("qlora", "none", "dpo"),
    ("lora", "none", "kto"),
    ("lora", "none", "reward"),
]
CASES += [
    ("full", "zero1", "sft"),
    ("full", "zero3", "sft"),
    ("lora", "zero3", "sft"),
    ("qlora", "zero2", "sft"),
]


def counted_over_traced(tmp_path, method, sharding, **changes):
    """Return GPU memory of a step by the closed form, as a share of what the dry run finds."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | SIZES))
    changes = {"method": method, "sharding": sharding, "model.dtype": "bfloat16"} | changes
    changes |= {"data.max_length": 2048, "data.packing": False}
    shape = shape_named("a100-80gb-1" if sharding == "none" else "a100-80gb-8")
    recipe = Recipe.model_validate(tiny_recipe(tmp_path, tmp_path / "x.jsonl", changes))
    case = Case(recipe=recipe, config=str(tmp_path), degrees=Degrees(shape.world_size), micro_batch=4)
    traced = ranks.run(1, trace.trace, case).peak_bytes
    work = workloads.workload(recipe, read_geometry(recipe.model), shape, 4, 1)
    counted = sum(size for name, size in memory(work).tables["steady step"].items() if name not in NOT_TRACED)
    return counted / traced


@pytest.mark.slow
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize(("method", "sharding", "objective"), CASES)
def test_the_closed_form_is_near_to_the_trace(method, sharding, objective, is_checkpointed, tmp_path):
    changes = {"objective": objective, "training.activation_checkpointing": is_checkpointed}
    assert 0.89 < counted_over_traced(tmp_path, method, sharding, **changes) < 1.21


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_an_attention_that_stores_its_scores_is_near_to_the_trace(is_checkpointed, dtype, tmp_path):
    changes = {"training.activation_checkpointing": is_checkpointed, "model.dtype": dtype}
    changes |= {"model.attn_implementation": "eager"}
    assert 0.95 < counted_over_traced(tmp_path, "lora", "none", **changes) < 1.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sharding", "beta"),
    [("full", "none", 0.1), ("lora", "ddp", 0), ("qlora", "none", 0.1), ("lora", "fsdp", 0)],
)
def test_the_closed_form_of_drawing_is_near_to_the_trace(method, sharding, beta, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | SIZES))
    objective = {
        "name": "grpo",
        "max_completion_length": 1024,
        "per_device_generation_batch_size": 64,
        "beta": beta,
    }
    changes = {"method": method, "sharding": sharding, "objective": objective, "model.dtype": "bfloat16"}
    shape = shape_named("a100-80gb-1" if sharding == "none" else "a100-80gb-8")
    recipe = Recipe.model_validate(
        tiny_recipe(tmp_path, tmp_path / "x.jsonl", changes | {"data.max_length": 2048})
    )
    case = Case(recipe=recipe, config=str(tmp_path), degrees=Degrees(shape.world_size), micro_batch=4)
    traced = ranks.run(1, trace.trace, case)
    work = workloads.workload(recipe, read_geometry(recipe.model), shape, 4, 16)
    tables = memory(work).tables
    for phase, found in ((DRAW, traced.drawing_bytes), ("steady step", traced.peak_bytes)):
        counted = sum(size for name, size in tables[phase].items() if name not in NOT_TRACED)
        assert 0.89 < counted / found < 1.21, phase
