"""Numbers of GPUs and shardings that files of other tools name."""

import pytest

from flytune.errors import RecipeError
from tests.support.converted import converted, written

AXOLOTL = {
    "base_model": "Qwen/Qwen3-8B",
    "datasets": [{"path": "a/b", "type": "alpaca"}],
    "learning_rate": 1e-5,
}
SFT = "--model_name_or_path Qwen/Qwen3-8B --dataset_name a/b --per_device_train_batch_size 1"


@pytest.mark.parametrize(
    ("more", "batch"),
    [
        ({"use_ray": True, "ray_num_workers": 4, "deepspeed": "zero3.json"}, 4),
        ({"dp_shard_size": 2, "dp_replicate_size": 2, "fsdp_config": {"offload_params": False}}, 4),
        ({"dp_shard_size": 16, "fsdp_config": {"offload_params": False}}, 16),
        ({"fsdp_config": {"offload_params": False}}, 8),
    ],
)
def test_keys_of_axolotl_say_how_many_gpus_there_are(more, batch, tmp_path):
    recipe = converted(tmp_path, "a.yml", AXOLOTL | more)[0]
    assert recipe.training.global_batch_size == batch
    assert recipe.sharding.replicas == more.get("dp_replicate_size", 1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"distributed_type": "MULTI_GPU", "num_processes": 2}, ("ddp", "none", 2)),
        ({"distributed_type": "NO", "num_processes": 1}, ("none", "none", 1)),
        (
            {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_offload_params": True}},
            ("fsdp", "cpu", 4),
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "num_processes": 16,
                "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"},
            },
            ("zero3", "cpu", 16),
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}, "num_processes": 8},
            ("zero2", "none", 8),
        ),
    ],
)
def test_a_configuration_of_accelerate_is_read(content, expected, tmp_path):
    written(tmp_path, "launch.yaml", {"compute_environment": "LOCAL_MACHINE"} | content)
    recipe, _ = converted(tmp_path, "run.sh", f"accelerate launch --config_file launch.yaml sft.py {SFT}")
    assert (recipe.sharding.name, recipe.sharding.offload, recipe.training.global_batch_size) == expected


@pytest.mark.parametrize("key", ["cp", "sp"])
def test_gpus_that_divide_a_sample_are_read(key, tmp_path):
    content = {"distributed_type": "FSDP", "num_processes": 8}
    content["parallelism_config"] = {f"parallelism_config_{key}_size": 4}
    written(tmp_path, "launch.yaml", {"compute_environment": "LOCAL_MACHINE"} | content)
    recipe, _ = converted(tmp_path, "run.sh", f"accelerate launch --config_file launch.yaml sft.py {SFT}")
    assert (recipe.sharding.sequence_parallel, recipe.training.global_batch_size) == (4, 2)
    axolotl = AXOLOTL | {"fsdp_config": {"offload_params": False}, "context_parallel_size": 4}
    recipe, _ = converted(tmp_path, "a.yml", axolotl)
    assert (recipe.sharding.sequence_parallel, recipe.training.global_batch_size) == (4, 2)


def test_an_assumed_stage_of_zero_is_said(tmp_path):
    assert (
        "ds.json, which is not on this machine, so that stage 3 is assumed"
        in converted(tmp_path, "a.yml", AXOLOTL | {"deepspeed": "ds.json"})[1]
    )
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    recipe, text = converted(tmp_path, "a.yml", AXOLOTL | {"deepspeed": "ds.json"})
    assert recipe.sharding.name == "zero2"
    assert "assumed" not in text


def test_what_no_plan_allows_is_refused_in_one_sentence(tmp_path):
    tables = {
        "rl": "dpo",
        "adapter": "lora",
        "lora_modules_to_save": ["embed_tokens", "lm_head"],
        "lora_target_linear": True,
    }
    tables |= {"datasets": [{"path": "org/pairs", "type": "chatml.intel"}]}
    with pytest.raises(RecipeError) as caught:
        converted(tmp_path, "a.yml", AXOLOTL | tables)
    assert "cannot be converted: objective: dpo with method.modules_to_save" in str(caught.value)
    assert "\n" not in str(caught.value)
