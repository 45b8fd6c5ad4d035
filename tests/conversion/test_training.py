"""Files in the form of axolotl and LLaMA-Factory: each is converted, and trains a tiny model on rows in its
tool's form."""

import json
import math
import random

import pytest

from flytune import data, yaml_core
from flytune.conversion import convert
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.training import loop

NUMBERS = [(left, right) for left in range(8) for right in range(6)]
AXOLOTL = {
    "val_set_size": 0.1,
    "output_dir": "./outputs/out",
    "sequence_len": 256,
    "gradient_accumulation_steps": 2,
    "micro_batch_size": 2,
    "num_epochs": 1,
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": 2e-4,
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": True,
    "logging_steps": 1,
    "weight_decay": 0.0,
    "warmup_ratio": 0.1,
    "evals_per_epoch": 2,
    "saves_per_epoch": 1,
}
QLORA = {
    "load_in_4bit": True,
    "adapter": "qlora",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
}
FACTORY = {
    "trust_remote_code": True,
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "template": "qwen3_nothink",
    "cutoff_len": 2048,
    "max_samples": 1000,
    "preprocessing_num_workers": 16,
    "output_dir": "saves/out",
    "logging_steps": 10,
    "save_steps": 500,
    "overwrite_output_dir": True,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
}


def question(left, right):
    return f"Add the numbers {left} and {right}."


def alpaca(left, right):
    return {
        "instruction": "Add the numbers.",
        "input": f"{left} and {right}",
        "output": f"The sum is {left + right}.",
    }


def alpaca_info(left, right):
    return alpaca(left, right) | {
        "instruction": f"Add {left} and {right}.",
        "input": "",
        "history": [["Hi.", "Hello."]],
    }


def labelled(left, right):
    is_right = (left + right) % 3 > 0
    answer = f"The sum is {left + right}." if is_right else "I do not know."
    return {
        "prompt": question(left, right),
        "completion": answer,
        "label": is_right,
        "rating": 4.0,
        "model": "m",
    }


def orca(left, right):
    answers = {"chosen": f"The sum is {left + right}.", "rejected": "I do not know."}
    return {
        "system": "Be short.",
        "input": question(left, right),
        **answers,
        "order": ["a", "b"],
        "rating": [9.0, 7.0],
    }


def turns(left, right):
    asked = [{"from": "human", "value": question(left, right)}]
    answers = {"chosen": f"The sum is {left + right}.", "rejected": "I do not know."}
    return {
        "conversations": asked,
        **{name: {"from": "gpt", "value": text} for name, text in answers.items()},
    }


def axolotl(rows, kind, **changes):
    def content(base, folder):
        write(folder / "rows.jsonl", rows)
        sets = [{"path": str(folder / "rows.jsonl"), "type": kind, "split": "train"}]
        return AXOLOTL | {"base_model": str(base), "datasets": sets} | changes

    return content


def factory(info, rows, **changes):
    def content(base, folder):
        for (name, entry), make in zip(info.items(), rows, strict=True):
            write(folder / "data" / entry.setdefault("file_name", f"{name}.json"), make, is_list=True)
        (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
        return FACTORY | {"model_name_or_path": str(base), "dataset": ",".join(info)} | changes

    return content


def write(path, make, is_list=False):
    path.parent.mkdir(exist_ok=True)
    rows = [make(*one) for one in random.Random(0).sample(NUMBERS, len(NUMBERS))]
    path.write_text(json.dumps(rows) if is_list else "".join(json.dumps(row) + "\n" for row in rows))


FILES = {
    "llama-3/qlora-1b": axolotl(
        alpaca, "alpaca", **QLORA, sample_packing=True, special_tokens={"pad_token": "<|pad|>"}
    ),
    "llama-3/fft-8b": axolotl(
        alpaca, "alpaca", optimizer="paged_adamw_8bit", sample_packing=True, flash_attention=True
    ),
    "llama-3/qlora-1b-kto": axolotl(
        labelled, "llama3.ultra", **QLORA, rl="kto", rl_beta=0.5, kto_desirable_weight=0.2, val_set_size=0.0
    ),
    "qwen2/reward-model": axolotl(
        orca,
        "bradley_terry.chat_template",
        reward_model=True,
        num_labels=1,
        chat_template="qwen_25",
        model_type="AutoModelForSequenceClassification",
        val_set_size=0.0,
    ),
    "train_lora/qwen3_lora_sft": factory(
        {"identity": {"columns": {"history": "history"}}, "alpaca_en_demo": {}},
        [alpaca_info, alpaca],
        stage="sft",
        learning_rate=1e-4,
    ),
    "train_lora/qwen3_lora_dpo": factory(
        {
            "dpo_en_demo": {
                "ranking": True,
                "formatting": "sharegpt",
                "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
            }
        },
        [turns],
        stage="dpo",
        pref_beta=0.1,
        pref_loss="sigmoid",
        learning_rate=5e-6,
    ),
}
CHAT = "<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n{1}<|im_end|>\n"
ALPACA = "### Instruction:\nAdd the numbers.\n\n### Input:\n4 and 2\n\n### Response:\nThe sum is 6.<|im_end|>"
ASKED, RIGHT, WRONG = question(4, 2), "The sum is 6.", "I do not know."
TEXTS = {
    "llama-3/qlora-1b": [ALPACA],
    "llama-3/fft-8b": [ALPACA],
    "llama-3/qlora-1b-kto": [
        f"user<|end_header_id|>\n\n{ASKED}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{WRONG}"
    ],
    "qwen2/reward-model": [
        "<|im_start|>system\nBe short.<|im_end|>\n" + CHAT.format(ASKED, answer) for answer in (RIGHT, WRONG)
    ],
    "train_lora/qwen3_lora_sft": [
        CHAT.format("Add the numbers.\n4 and 2", RIGHT),
        CHAT.format("Hi.", "Hello.") + CHAT.format("Add 4 and 2.", RIGHT),
    ],
    "train_lora/qwen3_lora_dpo": [CHAT.format(ASKED, RIGHT) + CHAT.format(ASKED, WRONG)],
}
"""Texts of samples, of which each file's data has some."""


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", FILES)
def test_a_converted_file_trains_on_rows_of_its_tool(name, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(yaml_core.dump(FILES[name](base, tmp_path)))
    content = yaml_core.load(convert(str(path)))
    # The machine of this test, and a short run.
    content |= {"hardware": {"shape": "cpu-1"}, "checkpoints": {"folder": str(tmp_path / "checkpoints")}}
    content["training"] |= {"max_steps": 2, "logging_steps": 1, "num_train_epochs": None}
    recipe = Recipe.model_validate(
        content | {"training": {key: one for key, one in content["training"].items() if one is not None}}
    )
    plan, dataset = planner.make(recipe), tmp_path / "dataset"
    data.prepare(DataRequest.of(recipe, "x"), dataset)
    decode = data.load_tokenizer(recipe.model, recipe.data).decode
    samples = [decode(row["input_ids"]) for row in data.load(dataset, "train")]
    assert [text for text in TEXTS[name] if not any(text in sample for sample in samples)] == []
    result = loop.fit(recipe, plan, shape_named(plan.shape), dataset, tmp_path / "out")
    assert [math.isfinite(step.loss) and step.grad_norm > 0 for step in result.steps] == [True, True]
