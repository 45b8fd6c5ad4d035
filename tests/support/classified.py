"""Small data sets of texts with labels, and their classifiers by transformers' own trainer."""

import random
from pathlib import Path

from flytune.models import heads
from tests.support import objective_runs
from tests.support.tiny import write_rows
from training_estimates import meta_model

LABELS = ["sum", "product", "difference"]


def write_classified(path: Path, n: int) -> Path:
    """Write `n` different texts as JSON Lines, about sums and products, with the place of that label."""
    draw = random.Random(0)
    rows = []
    for index in range(n):
        place, number = draw.randrange(2), draw.randrange(100)
        rows.append({"text": f"Question {index}: the {LABELS[place]} of {number} and 7.", "label": place})
    return write_rows(path, rows)


def logs_of_transformers(recipe, inputs, out):
    """Return the loss and the gradient norm of three steps of transformers' Trainer on the same texts, which
    are tokenized here, and padded on the left for decoders."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.nn import functional
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    torch.set_num_threads(1)
    training, section, folder = recipe.training, recipe.objective, recipe.model.name_or_path
    kind = {"problem_type": section.problem_type, "num_labels": len(section.labels)}
    model, read = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype="float32", output_loading_info=True, **kind
    )
    heads.head_of(recipe).draw(model, read["missing_keys"], training.seed)
    # Positions of encoders are counted from the first column on.
    side = "right" if model.config.model_type in meta_model.ENCODERS else "left"
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    model.config.pad_token_id = tokenizer.pad_token_id
    set_seed(training.seed)
    if recipe.method.name == "lora":
        own = {
            "target_modules": "all-linear",
            "task_type": "SEQ_CLS",
            "modules_to_save": [*heads.modules_of(model)],
        }
        config = LoraConfig(r=recipe.method.r, lora_alpha=recipe.method.lora_alpha, **own)
        model = get_peft_model(model, config)
    texts = objective_runs.in_order_of_training(
        recipe,
        inputs,
        lambda row, ids: tuple(tokenizer(row["text"])["input_ids"]),
        lambda row: tuple(row["input_ids"]),
        rows="classified",
    )
    several = section.problem_type == "multi_label_classification"

    def target(row):
        if several:
            return [float(label in row["labels"]) for label in section.labels]
        return row["label"]

    rows = [dict(tokenizer(row["text"])) | {"labels": target(row)} for row in texts]
    weights = torch.tensor([section.class_weight.get(label, 1.0) for label in section.labels])

    def weighted(outputs, labels, **_):
        if several:
            return functional.binary_cross_entropy_with_logits(outputs.logits, labels, weight=weights)
        losses = functional.cross_entropy(outputs.logits, labels, weight=weights, reduction="none")
        return losses.mean()

    trainer = Trainer(
        model,
        TrainingArguments(**objective_runs.three_steps(training, out)),
        train_dataset=rows,
        data_collator=DataCollatorWithPadding(tokenizer),
        # Without weights the loss is the model's own.
        compute_loss_func=weighted if section.class_weight else None,
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["grad_norm"]) for entry in logs]
