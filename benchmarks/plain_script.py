"""The peer of `pyflyte run`: what a TRL script does for the same artifact, from the same model, data and
steps.

It loads and splits the data, trains, scores base and tuned model on the held-out rows, lets both answer a
question, and saves.
"""

import json
import math
import sys
from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main(base: str, data: str, steps: int, out: Path) -> None:
    """Fine-tune `base` on instruction/input/output rows, and write model and metrics to `out`."""
    rows = load_dataset("json", data_files=data, split="train").map(
        _as_prompt, remove_columns=["instruction", "input", "output"]
    )
    split = rows.train_test_split(test_size=0.2, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    args = SFTConfig(
        output_dir=str(out / "checkpoints"),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_length=128,
        gradient_checkpointing=False,
        eval_strategy="no",
        save_strategy="no",
        use_cpu=True,
        report_to=[],
    )
    held_out = split["test"].select(range(8))
    trainer = SFTTrainer(
        model, args, train_dataset=split["train"], eval_dataset=held_out, processing_class=tokenizer
    )
    metrics = {"base": _measure(trainer, tokenizer, held_out)}
    trainer.train()
    metrics["tuned"] = _measure(trainer, tokenizer, held_out)
    trainer.save_model(str(out / "model"))
    (out / "metrics.json").write_text(json.dumps(metrics))


def _as_prompt(row: dict) -> dict:
    return {"prompt": f"{row['instruction']}\n{row['input']}\n", "completion": row["output"]}


def _measure(trainer, tokenizer, held_out) -> dict:
    loss = trainer.evaluate()["eval_loss"]
    inputs = tokenizer(held_out[0]["prompt"], return_tensors="pt")
    answer = trainer.model.generate(input_ids=inputs["input_ids"], max_new_tokens=8, do_sample=False)
    return {"loss": loss, "perplexity": math.exp(loss), "answer": tokenizer.decode(answer[0])}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
