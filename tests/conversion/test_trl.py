"""Arguments of TRL whose values change on the way."""

import pytest

from flytune.errors import RecipeError
from tests.support import converted as support

BASE = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "a/b", "output_dir": "o"}


def converted(tmp_path, **changes):
    return support.converted(tmp_path, "sft.yaml", BASE | changes)


def test_files_of_a_mixture_are_sources(tmp_path):
    given = [
        {"path": "a/b", "columns": ["messages"]},
        {"path": "json", "data_files": {"train": ["a.jsonl", "b.jsonl"], "test": "c.jsonl"}},
        {"path": "csv", "data_files": ["d.csv", "e.csv"]},
        {"path": "./rows", "split": "train"},
    ]
    recipe, text = converted(
        tmp_path, dataset_name=None, datasets=given, test_split_size=0.1, eval_strategy="steps", eval_steps=5
    )
    assert [source.name for source in recipe.data.sources] == [
        "a/b",
        "a.jsonl",
        "b.jsonl",
        "d.csv",
        "e.csv",
        "./rows",
    ]
    assert recipe.data.heldout_fraction == 0.1
    assert "# datasets: columns: columns that no sample has are not read" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset_name": "./rows.jsonl", "dataset_train_split": "train[:5%]"},
        {"dataset_name": None, "datasets": [{"path": "json", "data_files": ["a.jsonl"], "split": "dev"}]},
    ],
)
def test_a_part_of_a_file_is_refused(changes, tmp_path):
    with pytest.raises(RecipeError, match="split: .* a file is read completely; write max_samples"):
        converted(tmp_path, **changes)


@pytest.mark.parametrize("strategy", [None, "no", False])
def test_eval_steps_alone_evaluate_nothing(strategy, tmp_path):
    recipe, text = converted(tmp_path, eval_steps=50, eval_strategy=strategy)
    assert (recipe.evaluation.eval_steps, recipe.data.eval_split, recipe.data.heldout_fraction) == (
        None,
        None,
        0,
    )
    assert "# eval_steps: without eval_strategy TRL does not evaluate" in text


def test_a_length_without_limit_is_said(tmp_path):
    assert (
        "max_length: 1024  # max_length: None there, which cuts nothing"
        in converted(tmp_path, max_length=None)[1]
    )
    assert "None there" not in converted(tmp_path)[1]


def test_wrapped_packing_splits_long_samples(tmp_path):
    recipe, _ = converted(tmp_path, packing=True, packing_strategy="wrapped")
    assert (recipe.data.packing, recipe.data.too_long) == (True, "split")


def test_a_launchers_keys_of_a_yaml_count_gpus(tmp_path):
    assert converted(tmp_path, num_processes=4)[0].training.global_batch_size == 32
    assert converted(tmp_path, env={"CUDA_VISIBLE_DEVICES": "0,1"})[0].training.global_batch_size == 16
    recipe, text = converted(tmp_path, accelerate_config="zero2", num_processes=2)
    assert (recipe.sharding.name, recipe.training.global_batch_size) == ("zero2", 16)
    assert "not known as a key" not in text


LINES = {
    "chats.jsonl": '{"messages": [{"role": "user", "content": "q"}]}\n',
    "pairs.jsonl": '{"prompt": "q", "completion": "a"}\n',
    "texts.csv": "text,source\na,b\n",
}


@pytest.mark.parametrize(
    ("changes", "only", "form"),
    [
        ({}, False, "messages"),
        ({"dataset_name": "chats.jsonl"}, False, "messages"),
        ({"dataset_name": "texts.csv"}, False, "text"),
        ({"dataset_text_field": "body"}, False, "text"),
        ({"dataset_name": "pairs.jsonl"}, True, "auto"),
        ({"assistant_only_loss": True}, True, "auto"),
        ({"completion_only_loss": True}, True, "auto"),
        ({"completion_only_loss": False}, False, "auto"),
    ],
)
def test_the_tokens_that_trl_trains_are_trained(changes, only, form, tmp_path):
    """By default every token of chats, and the completions of rows of prompt and completion."""
    for name, lines in LINES.items():
        support.written(tmp_path, name, lines)
    data = converted(tmp_path, **changes)[0].data
    assert (data.completion_only_loss, data.format) == (only, form)


def test_a_mixture_of_chats_and_completions_is_refused(tmp_path):
    support.written(tmp_path, "pairs.jsonl", LINES["pairs.jsonl"])
    mixture = [{"path": "./pairs.jsonl"}, {"path": "a/b"}]
    with pytest.raises(RecipeError, match="write assistant_only_loss: true, or divide the file"):
        converted(tmp_path, dataset_name=None, datasets=mixture)
    assert converted(tmp_path, dataset_name=None, datasets=mixture, assistant_only_loss=True)[
        0
    ].data.completion_only_loss


@pytest.mark.parametrize(
    "key", ["truncation_mode", "f_divergence_type", "chat_template_kwargs", "reference_free"]
)
def test_a_key_that_changes_what_is_trained_is_refused(key, tmp_path):
    harmless = {"truncation_mode": "keep_start", "f_divergence_type": "reverse_kl"}
    converted(tmp_path, **{key: harmless.get(key)})
    with pytest.raises(RecipeError, match=f"cannot be converted: {key}: "):
        converted(tmp_path, **{key: "keep_end"})


def test_gkd_is_distillation_of_the_answers_of_data_and_student(tmp_path):
    content = BASE | {"teacher_model_name_or_path": "Qwen/Qwen3-4B"}
    recipe, text = support.converted(
        tmp_path, "gkd.yaml", content | {"lmbda": 0, "beta": 0.3, "temperature": 0.9}
    )
    section = recipe.objective
    assert (section.name, section.teacher_model_name_or_path) == ("distill", "Qwen/Qwen3-4B")
    assert (section.beta, section.temperature) == (0.3, 1.0), "TRL's loss divides by no temperature"
    assert "temperature: GKD draws answers by it" in text
    assert section.on_policy == 0
    drawn, text = support.converted(tmp_path, "gkd.yaml", content | {"lmbda": 0.5, "max_new_tokens": 64})
    section = drawn.objective
    assert (section.on_policy, section.max_completion_length, section.drawing_temperature) == (0.5, 64, 0.9)
    assert "lmbda: GKD draws the answers of whole micro batches" in text
    for changes, said in (({}, "lmbda is missing"), ({"lmbda": 0, "seq_kd": True}, "not of a teacher")):
        with pytest.raises(RecipeError, match=said):
            support.converted(tmp_path, "run.yaml", content | changes)


@pytest.mark.parametrize(
    "given",
    [
        {"torch_dtype": "bfloat16", "attn_implementation": "eager"},
        "{dtype: bfloat16, attn_implementation: eager}",
    ],
)
def test_arguments_of_loading_are_read(given, tmp_path):
    recipe, _ = converted(tmp_path, model_init_kwargs=given)
    assert (recipe.training.master_dtype, recipe.model.attn_implementation) == ("bfloat16", "eager")


def test_an_argument_that_loads_another_model_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="model_init_kwargs: quantization_config: a base is loaded as its"):
        converted(
            tmp_path, model_init_kwargs={"use_cache": False, "quantization_config": {"load_in_4bit": True}}
        )
