"""Plans, workloads and shapes made from sample recipes."""

from flytune.hardware import Shape, shape_named
from flytune.models import config_json
from flytune.planning import planner, workloads
from flytune.recipe import Recipe
from tests.support.recipes import content
from training_estimates import config_sizes

LLAMA_8B = config_json.shipped()["meta-llama/Llama-3.1-8B-Instruct"]["config"]
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True}


def recipe_of(**changes):
    return Recipe.model_validate(content(**changes))


def plan_of(config=SMALL, **changes):
    return planner.make(recipe_of(**changes), geometry=config_sizes.geometry(config, "a/b"))


def workload_of(recipe, config=LLAMA_8B, shape=None, micro_batch=1):
    shape = shape or shape_named("h100-8")
    return workloads.workload(recipe, config_sizes.geometry(config, "a/b"), shape, micro_batch, 1)


def shape_of(**changes):
    row = {"name": "s", "accelerator": "X", "processes": 1, "gpu_memory_gib": 80, "cpu": 4, "memory_gib": 64}
    return Shape(**(row | {"shared_memory_gib": 8, "disk_gib": 500, "price_per_hour": 1.0} | changes))


GEOMETRY = config_sizes.geometry(LLAMA_8B, "a/b")
TRAINING = {"learning_rate": 1e-4, "global_batch_size": 64}


def ranked(by="price", geometry=GEOMETRY, **changes):
    return planner.rank(
        recipe_of(**({"training": TRAINING, "sharding": "fsdp"} | changes)), by, geometry=geometry
    )
