"""Files of TRL and axolotl that train by GRPO."""

import pytest

from flytune import yaml_core
from flytune.cli import main
from flytune.conversion import convert
from flytune.errors import RecipeError
from flytune.rewards.shipped import regular_expression
from tests.support.converted import converted, written

TRL = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "a/b", "reward_funcs": ["accuracy_reward"]}
AXOLOTL = {
    "base_model": "Qwen/Qwen2.5-0.5B",
    "rl": "grpo",
    "datasets": [{"path": "openai/gsm8k", "name": "main", "type": "own.rows"}],
    "adapter": "lora",
    "lora_target_linear": True,
    "learning_rate": 1e-5,
    "micro_batch_size": 4,
    "sequence_len": 1024,
    "gradient_accumulation_steps": 2,
    "optimizer": "adamw_torch_fused",
    "trl": {
        "num_generations": 4,
        "max_completion_length": 128,
        "beta": 0.001,
        "temperature": 0.7,
        "use_vllm": True,
        "vllm_server_port": 8000,
        "scale_rewards": True,
        "loss_type": "grpo",
        "epsilon": 0.2,
        "reward_funcs": ["own.format_reward", "own.right"],
        "reward_weights": [1.0, 2.0],
    },
}


def test_trls_defaults_are_written(tmp_path):
    recipe, text = converted(tmp_path, "grpo.yaml", TRL)
    objective = recipe.objective
    assert [(reward.name, reward.column, reward.weight) for reward in objective.rewards] == [
        ("exact_answer", "solution", 1)
    ]
    assert (objective.group_size, objective.max_completion_length, objective.loss_type) == (8, 512, "dapo")
    assert objective.clip_range == (0.2, 0.2)
    assert (recipe.training.learning_rate, recipe.data.max_length, recipe.data.too_long) == (
        1e-6,
        1536,
        "error",
    )
    assert "Keys of TRL without a counterpart" not in text


def test_a_reward_of_thoughts_judges_as_trls(tmp_path):
    recipe, _ = converted(
        tmp_path,
        "a.yaml",
        TRL | {"reward_funcs": ["think_format_reward", "accuracy_reward"], "reward_weights": [0.5, 2]},
        objective="grpo",
    )
    form, answer = recipe.objective.rewards
    assert (form.weight, answer.weight) == (0.5, 2)
    judged = [
        regular_expression(text, form.pattern)
        for text in ("<think>x\ny</think>z", "<think>x", "<think><think></think>")
    ]
    assert judged == [1, 0, 0]


def test_rewards_of_ones_own_are_to_be_filled_in(tmp_path, capsys):
    text = convert(written(tmp_path, "a.yml", AXOLOTL))
    content = yaml_core.load(text)
    assert content["objective"] == {
        "name": "grpo",
        "rewards": [],
        "group_size": 4,
        "max_completion_length": 128,
        "temperature": 0.7,
        "beta": 0.001,
        "loss_type": "grpo",
        "epsilon": 0.2,
        "scale_rewards": "group",
        "engine": {"name": "vllm"},
    }
    assert "own.format_reward (weight 1.0), own.right (weight 2.0)" in " ".join(text.split())
    assert "not known as a key" not in text
    (tmp_path / "recipe.yaml").write_text(text)
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 1
    assert "objective.rewards: name what judges the answers: exact_answer, regular" in capsys.readouterr().err
    (tmp_path / "recipe.yaml").write_text(text.replace("rewards: []", "rewards: [exact_answer]"))
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"loss_type": "bnpo"},
            "loss_type: bnpo: the losses of objective grpo are grpo, dr_grpo, dapo, cispo",
        ),
        ({"num_iterations": 4}, "num_iterations: 4: each answer is trained in one step"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "a Jinja file in which the values are set"),
        (
            {"generation_kwargs": {"stop_token_ids": [1]}},
            "answers are drawn by temperature, top_p, top_k and min_p",
        ),
        ({"num_generations": 3}, "3"),
        ({"reward_weights": [1.0]}, "1 weight for 2 rewards"),
    ],
)
def test_what_no_recipe_can_is_refused(changes, said, tmp_path):
    with pytest.raises(RecipeError, match=said):
        convert(written(tmp_path, "a.yml", AXOLOTL | {"trl": AXOLOTL["trl"] | changes}))


def test_a_command_line_of_grpo(tmp_path):
    line = (
        "trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name a/b --reward_funcs "
        "accuracy_reward --num_generations 4"
    )
    recipe, _ = converted(
        tmp_path, "run.sh", f"{line} --use_vllm --importance_sampling_level sequence --loss_type grpo"
    )
    assert (recipe.objective.group_size, recipe.objective.importance_sampling_level) == (4, "sequence")
    assert recipe.objective.clip_range == (0.2, 0.2)


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ("--vllm_gpu_memory_utilization 0.2 --vllm_mode server", 0.2),
        ("--use_peft --load_in_4bit", None),
        ("--vllm_importance_sampling_correction false", None),
    ],
)
def test_vllm_draws_where_a_recipe_may_have_it(words, share, tmp_path):
    line = (
        "trl grpo --model_name_or_path a/b --dataset_name a/b --reward_funcs accuracy_reward --use_vllm true"
    )
    recipe, text = converted(tmp_path, "run.sh", f"{line} --num_generations 4 {words}")
    assert getattr(recipe.objective.engine, "gpu_memory_utilization", None) == share
    assert share is not None or "transformers draws" in text
