"""Command lines of TRL, LLaMA-Factory and axolotl, as scripts have them."""

import pytest

from flytune import yaml_core
from flytune.conversion import convert
from flytune.errors import RecipeError
from flytune.recipe import peers
from tests.support.converted import converted, written

SFT = "--model_name_or_path Qwen/Qwen3-0.6B --dataset_name a/b"
FACTORY = (
    "--stage sft --do_train True --model_name_or_path Qwen/Qwen3-0.6B --dataset identity --template qwen"
)
YAML = {"model_name_or_path": "Qwen/Qwen3-0.6B", "stage": "sft", "dataset": "identity", "learning_rate": 1e-4}
AXOLOTL = {
    "base_model": "Qwen/Qwen3-0.6B",
    "datasets": [{"path": "a/b", "type": "alpaca"}],
    "micro_batch_size": 2,
    "learning_rate": 1e-4,
}


def recipe_of(tmp_path, text, **arguments):
    return converted(tmp_path, "run.sh", text, **arguments)[0]


@pytest.mark.parametrize(
    ("line", "batch", "sharding"),
    [
        (f"CUDA_VISIBLE_DEVICES=0,1 trl sft {SFT}", 16, "ddp"),
        (f"export CUDA_VISIBLE_DEVICES=0,1,2,3\ntrl sft {SFT}", 32, "ddp"),
        (f"torchrun --nproc-per-node=2 --nnodes 2 sft.py {SFT}", 32, "ddp"),
        (f"deepspeed --num_gpus 4 my_sft.py {SFT} --deepspeed zero2.json", 32, "zero2"),
        (f"python -m accelerate.commands.launch --multi_gpu -m trl.scripts.sft {SFT}", 64, "ddp"),
        (f"trl sft --accelerate_config multi_gpu {SFT}", 64, "ddp"),
        (f"trl sft --accelerate_config zero3 --num_processes 2 {SFT}", 16, "zero3"),
        (f"NPROC=4\naccelerate launch --num_processes $NPROC sft.py {SFT}", 32, "ddp"),
        (f"CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train {FACTORY}", 16, "ddp"),
        (f"FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=4 llamafactory-cli train {FACTORY}", 64, "ddp"),
        (f"accelerate launch --config_file fsdp.yaml --num_processes 2 src/train.py {FACTORY}", 16, "fsdp"),
    ],
)
def test_the_batch_is_that_of_all_processes_of_the_launcher(line, batch, sharding, tmp_path):
    recipe = recipe_of(tmp_path, line)
    assert (recipe.training.global_batch_size, recipe.sharding.name) == (batch, sharding)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        (f"# a comment\ntrl sft {SFT} \\  \n  --bf16 True\necho done", "model.dtype", "bfloat16"),
        (
            f"M=Qwen/Qwen3-4B\ntrl sft {SFT} --model_name_or_path=${{M}}",
            "model.name_or_path",
            "Qwen/Qwen3-4B",
        ),
        (f"trl sft {SFT} --max_length ${{LENGTH:-512}}", "data.max_length", 512),
        (f"trl sft {SFT} --output_dir $OUT/x", "data.dataset_name", "a/b"),
        (f"trl sft {SFT} --dataset_name=my-lib/my-rows", "data.dataset_name", "my-lib/my-rows"),
        (f"trl sft {SFT} --no_gradient_checkpointing", "training.activation_checkpointing", False),
        (f"trl sft {SFT} --no_bf16", "model.dtype", "float32"),
        (f"trl sft {SFT} --learning_rate 1e-5 > log.txt 2>&1 &", "training.learning_rate", 1e-5),
        (f"pip install trl\npython prepare.py --x 1\npython my_dpo_run.py {SFT}", "objective.name", "dpo"),
        (f"python gkd.py {SFT} --teacher_model_name_or_path a/b --lmbda 0", "objective.beta", 0.5),
        ("llamafactory-cli train lf.yaml learning_rate=1e-5", "training.learning_rate", 1e-5),
        ("FORCE_TORCHRUN=1 python src/train.py lf.yaml", "training.learning_rate", 1e-4),
        ("axolotl train ax.yml --learning-rate 1e-3", "training.learning_rate", 1e-3),
        ("accelerate launch --num_processes 2 -m axolotl.cli.train ax.yml", "training.global_batch_size", 4),
    ],
)
def test_a_script_is_read_as_the_shell_reads_it(text, field, value, tmp_path):
    written(tmp_path, "lf.yaml", YAML)
    written(tmp_path, "ax.yml", AXOLOTL)
    section, name = field.split(".")
    assert getattr(getattr(recipe_of(tmp_path, text), section), name) == value


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            f"srun accelerate launch --num_processes $((8*N)) sft.py {SFT}",
            "write the number there, or say --gpus N",
        ),
        (f"trl sft {SFT} --learning_rate $LR", "--learning_rate $LR: a variable that this file does not set"),
        (f"python sft_vlm.py {SFT}", "sft_vlm: scripts for images, video and audio are not read"),
        (f"python dpo_online.py {SFT}", "dpo_online: the objectives are sft, dpo, kto, reward, grpo"),
        (f"trl distillation {SFT}", "lmbda is missing, the share of the answers that the student draws"),
        (f"trl sft {SFT} --loss_type dft", "loss_type: dft: sft has the cross entropy of each token"),
        ("llamafactory-cli train nowhere.yaml", "nowhere.yaml"),
        (f"trl grpo {SFT} --num_iterations 2", "num_iterations: 2: each answer is trained in one step"),
        ("trl sft --model_name_or_path a/b", "dataset_name is missing"),
        ("trl sft --model_name_or_path 'a/b", "the command line cannot be read: No closing quotation"),
        (f"trl sft {SFT} --optim muon", "optimizer muon: there is none like it"),
        (f"trl sft {SFT} --optim schedule_free_adamw", "other weights for training than for evaluation"),
    ],
)
def test_a_command_that_no_recipe_can_stand_for_is_refused_in_one_sentence(line, said, tmp_path):
    with pytest.raises(RecipeError) as caught:
        recipe_of(tmp_path, line)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_callers_number_of_gpus_stands_for_a_variable(tmp_path):
    assert (
        recipe_of(
            tmp_path, f"accelerate launch --num_processes $N sft.py {SFT}", gpus=3
        ).training.global_batch_size
        == 24
    )


def test_a_command_in_a_comment_of_a_yaml_is_no_command(tmp_path):
    _, text = converted(tmp_path, "a.yaml", "# trl sft --config this.yaml\n" + yaml_core.dump(YAML))
    assert "Made of LLaMA-Factory's a.yaml" in text


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("llamafactory-cli train \\\n --stage sft", "LLaMA-Factory"),
        ("python src/train_bash.py --stage sft", "LLaMA-Factory"),
        ("axolotl train a.yml", "axolotl"),
        ("trl dpo --beta 1", "TRL"),
        ("# trl dpo --beta 1", None),
        ("echo sft", None),
    ],
)
def test_the_tool_of_a_script(text, tool):
    assert peers.tool_of(text) == tool


def test_json_of_llama_factory_may_have_tabs(tmp_path):
    content = '{\n\t"stage": "sft", "model_name_or_path": "Qwen/Qwen3-0.6B",\n\t"dataset": "identity"\n}'
    assert "Made of LLaMA-Factory's a.json" in converted(tmp_path, "a.json", content)[1]


def test_a_classifier_of_transformers_has_the_columns_of_its_command(tmp_path):
    command = (
        "python run_classification.py --model_name_or_path Qwen/Qwen3-0.6B --train_file a.csv "
        "--validation_file b.csv --text_column_names premise,hypothesis --text_column_delimiter '; ' "
        "--label_column_name gold --num_train_epochs 2 --output_dir o"
    )
    text = convert(written(tmp_path, "run.sh", command))
    recipe = yaml_core.load(text)
    assert recipe["data"] == {
        "path": "a.csv",
        "columns": {"text": "premise", "text_pair": "hypothesis", "label": "gold"},
        "input_separator": "; ",
        "max_length": 128,
        "heldout_path": "b.csv",
    }
    assert (recipe["model"]["dtype"], recipe["method"], recipe["training"]["learning_rate"]) == (
        "float32",
        "full",
        5e-5,
    )
    assert recipe["objective"] == {"name": "classify", "labels": []}, "a person names them"
    with pytest.raises(RecipeError, match="do_regression: objective: classify has labels"):
        convert(written(tmp_path, "run.sh", f"{command} --do_regression"))
    of_trl = {"model_name_or_path": "a/b", "dataset_name": "a/b", "output_dir": "o"}
    with pytest.raises(RecipeError, match="TRL trains no classifier of texts"):
        convert(written(tmp_path, "a.yaml", of_trl), objective="classify")
