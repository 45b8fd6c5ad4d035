"""Files in the form of axolotl, LLaMA-Factory and TRL: each becomes a recipe that is planned, or is refused
in one sentence."""

import json
from pathlib import Path

import pytest

from flytune import yaml_core
from flytune.cli import main
from flytune.conversion import convert
from flytune.data.columns import NamedRow
from flytune.data.formats import Chat
from flytune.data.formats import convert as sample_of
from flytune.data.rows.labelled import labelled_of
from flytune.data.rows.pairs import pair_of
from flytune.errors import RecipeError
from flytune.mistakes import alternatives, is_model
from flytune.planning import base_sizes, planner
from flytune.recipe import Recipe, peers
from tests.support.converted import converted, recipe_of, written
from tests.support.full_disk import files_of_at_most

HERE = Path(__file__).parent
AXOLOTL = yaml_core.load((HERE / "axolotl.yaml").read_text())
LLAMA_FACTORY = yaml_core.load((HERE / "llamafactory.yaml").read_text())
WHOLE = AXOLOTL["common"] | AXOLOTL["adapter"]


def files():
    for name, content in AXOLOTL["files"].items():
        yield (
            f"{name}.yml",
            content.pop("planned"),
            WHOLE | {key: value or None for key, value in content.items()},
        )
    for name, content in LLAMA_FACTORY["files"].items():
        yield f"{name}.yaml", content.pop("planned"), LLAMA_FACTORY["common"] | content


FILES = list(files())


def test_there_are_thirty_files_of_each():
    assert min(sum(name.endswith(suffix) for name, _, _ in FILES) for suffix in (".yml", ".yaml")) >= 30


@pytest.mark.parametrize(("name", "planned", "content"), FILES, ids=[name for name, _, _ in FILES])
def test_a_file_is_planned_or_refused_in_one_sentence(name, planned, content, tmp_path):
    path = written(tmp_path, name, content)
    if planned is True:
        recipe = recipe_of(text := convert(path))
        assert planner.make(recipe, geometry=base_sizes.read_geometry(recipe.model), samples=1000).shape
        # Each key is in the recipe, or has a comment.
        assert "not known as a key" not in text
        tool = "axolotl" if name.endswith(".yml") else "LLaMA-Factory"
        assert [key for key in content if not peers.counterpart(tool, key)] == []
        return
    with pytest.raises(RecipeError) as caught:
        recipe = recipe_of(convert(path))
        base_sizes.read_geometry(recipe.model)
    assert planned in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_whole_file_of_another_tool_is_recognized(tmp_path, capsys):
    for name, content in (("axolotl", FILES[0][2]), ("LLaMA-Factory", FILES[-5][2])):
        path = written(tmp_path, "a.yaml", content)
        assert main(["plan", path]) == 1
        said = capsys.readouterr().err
        assert f"this is a file of {name}, not a recipe; make a recipe of it: flytune convert {path}" in said
        assert len(said.strip().splitlines()) == 1


def test_the_command_prints_the_recipe_or_writes_a_new_file(tmp_path, capsys):
    path, out = written(tmp_path, "qlora.yml", FILES[0][2]), tmp_path / "recipe.yaml"
    assert main(["convert", path]) == 0
    shown = capsys.readouterr().out
    assert main(["convert", path, "--output", str(out)]) == 0
    assert out.read_text() == shown
    assert main(["convert", path, "--output", str(out)]) == 1
    assert "exists already; give a new one" in capsys.readouterr().err
    assert Recipe.from_yaml(out).method.name == "qlora"


def test_a_full_disk_leaves_no_file(tmp_path, capsys):
    path, out = written(tmp_path, "qlora.yml", FILES[0][2]), tmp_path / "recipe.yaml"
    with files_of_at_most(40):
        assert main(["convert", path, "--output", str(out)]) == 1
    assert "recipe.yaml: cannot be written: File too large" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["qlora.yml"]


def test_a_file_of_thousands_of_data_sets_is_refused_in_a_sentence(tmp_path):
    content = FILES[0][2] | {
        "datasets": [{"path": f"f{number}.jsonl", "type": "alpaca"} for number in range(5000)]
    }
    with pytest.raises(
        RecipeError,
        match=r"a\.yml: cannot be converted: the recipe that it makes is longer than .* name a folder",
    ):
        convert(written(tmp_path, "a.yml", content))


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "micro_batch_size", "max_steps"])
def test_a_count_that_is_not_whole_is_not_cut(tmp_path, key):
    with pytest.raises(RecipeError, match=f"{key}: 1.5 is not a whole number"):
        convert(written(tmp_path, "a.yml", FILES[0][2] | {key: 1.5}))


def test_a_recipe_is_not_converted(tmp_path):
    path = written(tmp_path, "r.yaml", {"name": "r", "model": {"name_or_path": "a"}})
    with pytest.raises(RecipeError, match="no file of axolotl, LLaMA-Factory or TRL, by its keys"):
        convert(path)


def axolotl(tmp_path, gpus=None, **changes):
    given = (
        WHOLE | {"base_model": "Qwen/Qwen2.5-0.5B", "datasets": [{"path": "a/b", "type": "alpaca"}]} | changes
    )
    return converted(tmp_path, "a.yml", given, gpus=gpus)


def test_the_batch_is_that_of_all_gpus(tmp_path):
    assert axolotl(tmp_path)[0].training.global_batch_size == 8
    assert axolotl(tmp_path, gpus=4)[0].training.global_batch_size == 32
    assert axolotl(tmp_path, gpus=4)[0].sharding.name == "ddp"
    assert axolotl(tmp_path, deepspeed="deepspeed_configs/zero3.json")[0].training.global_batch_size == 64


def test_shares_of_steps_follow_from_times_in_an_epoch(tmp_path):
    recipe, text = axolotl(tmp_path, evals_per_epoch=4, saves_per_epoch=1, num_epochs=2)
    assert (recipe.evaluation.eval_steps, recipe.checkpoints.save_steps) == (0.125, "epoch")
    assert "a share of all steps: 1 / (4 x 2 epochs)" in text


def test_axolotl_trains_a_whole_model_in_bfloat16_and_drops_long_samples(tmp_path):
    recipe, _ = axolotl(tmp_path, adapter=None)
    assert (recipe.method.name, recipe.training.master_dtype, recipe.data.too_long) == (
        "full",
        "bfloat16",
        "drop",
    )
    assert (
        axolotl(tmp_path, adapter=None, gpus=8, deepspeed="zero2.json")[0].training.master_dtype == "float32"
    )


ASKED, RIGHT, WRONG = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
SAID = {"chosen": "a", "rejected": "b"}
TURNS = {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}
OWN = {"field_prompt": "query", "field_chosen": "yes", "field_rejected": "no", "prompt_format": "{prompt}"}


@pytest.mark.parametrize(
    ("kind", "row", "more"),
    [
        ("chatml.argilla", {"instruction": "q", "chosen_response": "a", "rejected_response": "b"}, {}),
        ("llama3.argilla_chat", TURNS, {}),
        ("chatml.icr", {"input": "q", **SAID}, {}),
        ("chatml.intel", {"question": "q", **SAID}, {}),
        ("llama3.prompt_pairs", {"prompt": "q", **SAID}, {}),
        ("chatml.ultra", {"prompt": "q", **TURNS}, {}),
        ("chat_template.default", {"messages": [ASKED], "chosen": RIGHT, "rejected": WRONG}, {}),
        (
            "chat_template.default",
            {"talk": [ASKED], "yes": RIGHT, "no": WRONG},
            {"field_messages": "talk", "field_chosen": "yes", "field_rejected": "no"},
        ),
        (
            "chat_template.default",
            {
                "messages": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            {"message_property_mappings": {"role": "from", "content": "value"}},
        ),
        (
            "chat_template.default",
            {
                "messages": [{"by": "user", "text": "q"}],
                "chosen": {"by": "assistant", "text": "a"},
                "rejected": {"by": "assistant", "text": "b"},
            },
            {"message_property_mappings": {"role": "by", "content": "text"}},
        ),
        (
            OWN | {"prompt_format": "Q: {prompt}"},
            {"query": "q", "yes": "a", "no": "b"},
            {"chat_template_jinja": "own.jinja"},
        ),
    ],
)
def test_pairs_of_axolotl_are_a_question_and_two_answers(kind, row, more, tmp_path):
    recipe, _ = axolotl(tmp_path, rl="dpo", datasets=[{"path": "a/b", "type": kind} | more])
    found = pair_of(NamedRow(row, recipe.data.columns, "here"))
    assert (found.chosen, found.rejected) == (Chat([ASKED, RIGHT]), Chat([ASKED, WRONG]))


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("chatml.argilla", {"instruction": "q", "completion": "a"}),
        ("chatml.argilla_chat", {"chosen": [ASKED], "completion": [RIGHT]}),
        ("chatml.intel", {"question": "q", "completion": "a"}),
        ("llama3.prompt_pairs", {"prompt": "q", "completion": "a"}),
        ("llama3.ultra", {"prompt": "q", "completion": "a"}),
        ("llama3.ultra", {"prompt": "q", "completion": [ASKED, RIGHT]}),
        (
            {
                "field_prompt": "query",
                "field_completion": "said",
                "field_label": "good",
                "prompt_format": "Q: {query}",
            },
            {"query": "q", "said": "a", "good": True},
        ),
    ],
)
def test_labelled_answers_of_axolotl_are_a_question_and_an_answer(kind, row, tmp_path):
    more = {} if isinstance(kind, str) else {"chat_template_jinja": "own.jinja"}
    recipe, _ = axolotl(tmp_path, rl="kto", datasets=[{"path": "a/b", "type": kind} | more])
    found = labelled_of(
        NamedRow({"label": True, **row}, recipe.data.columns, "here", format=recipe.data.format)
    )
    assert (found.samples, found.labels) == ([Chat([ASKED, RIGHT])], [True])


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("alpaca", {"instruction": "q", "input": "", "output": "a"}),
        ("gpteacher", {"instruction": "q", "input": "", "response": "a"}),
        ("oasst", {"INSTRUCTION": "q", "RESPONSE": "a"}),
        ("alpaca_w_system.load_open_orca_chatml", {"system_prompt": "", "question": "q", "response": "a"}),
        ("chat_template", {"messages": [ASKED, RIGHT]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
    ],
)
def test_chats_of_axolotl_are_a_question_and_an_answer(kind, row, tmp_path):
    recipe, _ = axolotl(tmp_path, datasets=[{"path": "a/b", "type": kind}])
    assert sample_of(NamedRow(row, recipe.data.columns, "here"), recipe.data.format) == Chat([ASKED, RIGHT])


@pytest.mark.parametrize(
    ("stage", "entry", "row"),
    [
        ("dpo", {"ranking": True}, {"instruction": "q", "input": "", **SAID}),
        (
            "rm",
            {"ranking": True, "columns": {"prompt": "prompt", "chosen": "y"}},
            {"prompt": "q", "y": "a", "rejected": "b"},
        ),
        (
            "dpo",
            {"ranking": True, "formatting": "sharegpt"},
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
        ),
        (
            "dpo",
            {"ranking": True, "formatting": "openai", "columns": {"messages": "messages"}},
            {"messages": [ASKED], "chosen": RIGHT, "rejected": WRONG},
        ),
        ("kto", {}, {"instruction": "q", "input": "", "output": "a", "kto_tag": True}),
        (
            "kto",
            {"formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"}},
            {"messages": [ASKED, RIGHT], "label": True},
        ),
        (
            "sft",
            {"columns": {"prompt": "p", "query": "q", "response": "r", "system": "s", "history": "h"}},
            {"p": "q", "q": "", "r": "a", "s": "", "h": []},
        ),
        (
            "sft",
            {
                "formatting": "sharegpt",
                "tags": {
                    "role_tag": "by",
                    "content_tag": "text",
                    "user_tag": "user",
                    "assistant_tag": "assistant",
                },
            },
            {"conversations": [{"by": "user", "text": "q"}, {"by": "assistant", "text": "a"}]},
        ),
    ],
)
def test_rows_of_llama_factory_are_a_question_and_answers(stage, entry, row, tmp_path):
    recipe, _ = llamafactory(
        tmp_path, {"ours": {"file_name": "x.json", "num_samples": 7} | entry}, stage=stage
    )
    found, columns = recipe.data, recipe.data.columns
    assert found.max_samples == 7
    if stage == "sft":
        assert sample_of(NamedRow(row, columns, "here"), found.format) == Chat([ASKED, RIGHT])
    elif stage == "kto":
        assert labelled_of(NamedRow(row, columns, "here", format=found.format)).samples == [
            Chat([ASKED, RIGHT])
        ]
    else:
        assert pair_of(NamedRow(row, columns, "here")).rejected == Chat([ASKED, WRONG])


def test_held_out_rows_of_llama_factory_have_a_form_of_their_own(tmp_path):
    entries = {
        "chats": {"file_name": "x.json", "formatting": "sharegpt"},
        "questions": {"file_name": "y.json", "columns": {"prompt": "q", "response": "a"}},
    }
    found = llamafactory(tmp_path, entries, dataset="chats", eval_dataset="questions")[0].data
    assert [source.format for source in found.sources] == ["sharegpt"]
    assert sample_of(NamedRow({"q": "q", "a": "a"}, found.columns, "here"), found.format) == Chat(
        [ASKED, RIGHT]
    )


def test_speakers_of_llama_factory_that_are_not_known_are_refused(tmp_path):
    entry = {"file_name": "x.json", "formatting": "sharegpt", "tags": {"user_tag": "USER"}}
    with pytest.raises(
        RecipeError, match="dataset: ours: user_tag: USER: of the names of this speaker, human, user are read"
    ):
        llamafactory(tmp_path, {"ours": entry})


def test_nothing_is_held_out_or_evaluated_where_the_tool_does_not(tmp_path):
    recipe, text = axolotl(tmp_path, val_set_size=0.0, evals_per_epoch=4)
    assert (recipe.data.heldout_fraction, recipe.evaluation.eval_steps) == (0, None)
    assert "# evals_per_epoch: without held-out data there is nothing to evaluate" in text
    assert llamafactory(tmp_path)[0].data.heldout_fraction == 0
    assert (
        llamafactory(tmp_path, val_size=0.1, eval_strategy="steps", eval_steps=50)[0].evaluation.eval_steps
        == 50
    )


@pytest.mark.parametrize("value", [[1], {"a": 1}, "x", -1, 0, True, 10**30, [[]], [{"path": ["a"]}], 1.5])
def test_values_of_other_types_are_refused_in_one_sentence(value, tmp_path):
    said = []
    for name, content in (("a.yml", FILES[0][2]), ("a.yaml", LLAMA_FACTORY["common"])):
        for key in content:
            try:
                convert(written(tmp_path, name, content | {key: value}))
            except RecipeError as error:
                said.append(str(error))
    assert [line for line in said if "\n" in line] == []
    assert said


def test_a_key_with_another_name_alone_is_in_the_recipe_where_it_has_an_effect(tmp_path):
    assert axolotl(tmp_path, lora_rank_pattern={"q_proj": 4})[0].method.rank_pattern == {"q_proj": 4}
    assert "# lora_rank_pattern: " in axolotl(tmp_path, lora_rank_pattern={"q_proj": 4}, adapter=None)[1]
    assert llamafactory(tmp_path, moe_aux_loss_coef=0.01)[0].training.router_aux_loss_coef == 0.01
    assert "# double_quantization: " in llamafactory(tmp_path, double_quantization=False)[1]


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def test_adapters_of_experts_and_their_balance_loss(tmp_path):
    moe = {"base_model": "Qwen/Qwen3-30B-A3B", "lora_target_parameters": EXPERTS, "lora_dropout": 0}
    recipe, _ = axolotl(tmp_path, **moe)
    assert (recipe.method.experts, recipe.training.router_aux_loss_coef) == (True, 0)
    recipe, _ = axolotl(
        tmp_path, **moe, model_config={"output_router_logits": True, "router_aux_loss_coef": 0.02}
    )
    assert recipe.training.router_aux_loss_coef == 0.02
    with pytest.raises(
        RecipeError, match="method.experts adapts gate_up_proj and down_proj of the experts, both"
    ):
        axolotl(tmp_path, **moe | {"lora_target_parameters": EXPERTS[:1]})


def test_a_key_that_nobody_knows_is_named(tmp_path):
    assert (
        "# my_key: not known as a key of axolotl; nothing of it is in this recipe"
        in axolotl(tmp_path, my_key=1)[1]
    )


def llamafactory(tmp_path, info=None, **changes):
    """Convert a file with these changes, beside which a dataset_info.json has these entries."""
    if info is not None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
        changes = {"dataset": ",".join(info)} | changes
    return converted(tmp_path, "a.yaml", LLAMA_FACTORY["common"] | changes)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        (axolotl, "train_on_eos", "none"),
        (axolotl, "curriculum_sampling", True),
        (llamafactory, "enable_thinking", False),
        (llamafactory, "disable_shuffling", True),
    ],
)
def test_a_value_that_is_no_default_is_refused_though_it_sounds_like_off(file, key, value, tmp_path):
    with pytest.raises(RecipeError, match=f"cannot be converted: {key}: "):
        file(tmp_path, **{key: value})
    assert file(tmp_path, **{key: {"none": "turn", False: True, True: False}[value]})


def test_the_defaults_of_llama_factory_are_written(tmp_path):
    without = dict.fromkeys(
        ("lora_rank", "learning_rate", "num_train_epochs", "lr_scheduler_type", "warmup_ratio")
    )
    recipe, _ = llamafactory(tmp_path, **without)
    assert (recipe.method.r, recipe.method.lora_alpha, recipe.method.lora_dropout) == (8, 16, 0.0)
    training = recipe.training
    assert (training.learning_rate, training.num_train_epochs, training.lr_scheduler_type) == (
        5e-5,
        3.0,
        "linear",
    )
    assert training.warmup_steps == 0


@pytest.mark.parametrize(("file", "key"), [(axolotl, "lr_scheduler"), (llamafactory, "lr_scheduler_type")])
def test_a_warm_up_that_the_tools_constant_does_not_use_is_not_in_the_recipe(file, key, tmp_path):
    recipe, text = file(tmp_path, **{key: "constant", "warmup_ratio": 0.1})
    assert recipe.training.warmup_steps == 0
    assert "warmup_steps: 0  # its constant does not use warmup_ratio either" in text


def test_dataset_info_beside_the_file_names_its_rows(tmp_path):
    info = {
        "ours": {"file_name": "ours.jsonl", "columns": {"prompt": "question", "response": "answer"}},
        "chats": {
            "hf_hub_url": "owner/chats",
            "formatting": "sharegpt",
            "columns": {"messages": "turns"},
            "tags": {"role_tag": "role", "content_tag": "content"},
        },
    }
    recipe, _ = llamafactory(tmp_path, info, dataset="ours,chats,identity", max_samples=None)
    first, second, third = recipe.data.sources
    assert first.path.endswith("data/ours.jsonl")
    assert first.columns == {"instruction": "question", "output": "answer"}
    assert (second.dataset_name, second.format, second.columns) == (
        "owner/chats",
        "messages",
        {"messages": "turns"},
    )
    assert third.path == "hf://datasets/llamafactory/demo_data/identity.json"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"file_name": "ours.jsonl", "split": "train[:5%]"}, "ours: split: .* a file is read completely"),
        ({"hf_hub_url": "a/b", "folder": "en"}, "ours: folder: en: .* write path: hf://datasets/a/b/en into"),
    ],
)
def test_a_part_of_a_data_set_of_llama_factory_is_refused(entry, said, tmp_path):
    with pytest.raises(RecipeError, match=said):
        llamafactory(tmp_path, {"ours": entry})


COMMAND = r"""#!/bin/bash
# full training
accelerate launch --config_file configs/deepspeed_zero3.yaml --num_processes 4 trl/scripts/sft.py \
    --model_name_or_path Qwen/Qwen3-8B \
    --dataset_name trl-lib/Capybara \
    --learning_rate 2.0e-5 --packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \
    --eos_token '<|im_end|>' --eval_strategy steps --eval_steps 100 --output_dir out
"""


def test_a_command_line_of_trl(tmp_path, capsys):
    path = written(tmp_path, "train.sh", COMMAND)
    recipe = recipe_of(convert(path))
    assert (recipe.sharding.name, recipe.training.global_batch_size, recipe.training.learning_rate) == (
        "zero3",
        64,
        2e-5,
    )
    assert (recipe.data.packing, recipe.data.eos_token, recipe.data.eval_split) == (
        True,
        "<|im_end|>",
        "test",
    )
    assert recipe.evaluation.eval_steps == 100
    assert main(["plan", path]) == 1
    assert "this is a file of TRL" in capsys.readouterr().err


def test_trl_with_an_adapter_on_four_bits(tmp_path):
    line = "trl dpo --model_name_or_path Qwen/Qwen3-8B --dataset_name a/b --use_peft --load_in_4bit"
    line += " --lora_target_modules q_proj v_proj"
    recipe = recipe_of(convert(written(tmp_path, "run.txt", f"{line} --beta=0.2 --report_to wandb\n")))
    assert (recipe.method.name, recipe.method.target_modules) == ("qlora", ["q_proj", "v_proj"])
    assert (recipe.objective.name, recipe.objective.beta, recipe.training.learning_rate) == ("dpo", 0.2, 1e-6)
    assert recipe.method.bnb_4bit_use_double_quant is False
    assert recipe.tracking.report_to == ["wandb"]


def test_a_yaml_of_trl(tmp_path):
    content = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "a/b", "output_dir": "o"}
    content |= {"use_peft": True, "max_length": 512}
    recipe = recipe_of(convert(written(tmp_path, "a.yaml", content), objective="reward"))
    assert (recipe.objective.name, recipe.data.format, recipe.data.max_length) == (
        "reward",
        "preference",
        512,
    )
    assert "sft: the file does not name it" in convert(written(tmp_path, "b.yaml", content))
    command = written(tmp_path, "c.sh", f"trl kto --config {tmp_path}/a.yaml --max_length 256")
    recipe = recipe_of(convert(command))
    assert (recipe.objective.name, recipe.data.max_length) == ("kto", 256)


def test_each_row_of_the_table_names_a_key_of_a_recipe():
    def keys(model, place=()):
        for name, field in model.model_fields.items():
            yield ".".join((*place, name))
            for kind in alternatives(field.annotation):
                if is_model(kind):
                    yield from keys(kind, (*place, name))

    known = set(keys(Recipe))
    rows = [one for of_tool in peers.table().values() for one in of_tool.values()]
    assert [row for row in rows if row.key is not None and row.key not in known] == []
    assert [row for row in rows if row.key is None and not row.change] == []


def test_texts_of_a_file_add_no_lines_and_write_no_control_characters(tmp_path):
    hostile = {
        "deepspeed": "zero3\npublish: {address: /elsewhere}",
        "\x1b[31mkey": 1,
        "a\u2028model: {}": 1,
        "b\u202e\ufffe": 1,
    }
    text = convert(written(tmp_path, "other.yaml", FILES[0][2] | hostile))
    assert recipe_of(text).publish.address is None
    assert recipe_of(text).sharding.name == "zero3"
    assert all(letter.isprintable() for letter in text.replace("\n", ""))
    assert "# \\x1b[31mkey: " in text
    assert "# b\\u202e\\ufffe: " in text


@pytest.mark.parametrize("named", ["/proc/self/mem", "/proc/kmsg", "large.json"])
def test_a_deepspeed_file_that_cannot_be_read_is_refused(named, tmp_path):
    (tmp_path / "large.json").write_bytes(b" " * (yaml_core.LARGEST + 1))
    with pytest.raises(RecipeError, match="cannot be converted: deepspeed: "):
        convert(written(tmp_path, "other.yaml", FILES[0][2] | {"deepspeed": named}))
