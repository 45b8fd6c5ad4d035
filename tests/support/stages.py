"""Stand-ins for the outputs of prepare and train, made in seconds, for tests of the stages after them."""

import hashlib
import math
import random
import shutil
from pathlib import Path
from typing import Any

from flytune.data import heldout_rows
from flytune.data.shards import content_hash
from flytune.export import folder as export_manifest
from flytune.models import loading, probe, scoring
from flytune.recipe import Recipe
from flytune.records import Bin, Manifest, Need, Plan, Shard, SourceCounts, SplitCounts, Step, TrainingResult
from flytune.records.contents import CONTENTS
from flytune.records.contents import seal as list_all
from tests.support.tiny import tiny_recipe


def recipe_for(base: Path, method: str, **changes: Any) -> Recipe:
    """Return a recipe of `method` on `base`; qlora gets the settings that it requires."""
    if method == "qlora":
        changes = {"sharding": "device_map", "model.dtype": "bfloat16", **changes}
    return Recipe.model_validate(tiny_recipe(base, Path("pairs.jsonl"), {"method": method, **changes}))


def write_dataset(folder: Path, base: Path, heldout: int = 12) -> Path:
    """Write a prepared data set of 32 training chats and `heldout` others in two shards, with the tokenizer
    of `base`."""
    import pyarrow
    import pyarrow.parquet
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(base))
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    rows = [_chat(tokenizer, index) for index in range(32 + heldout)]
    shards: dict[str, list[Shard]] = {"train": [], "heldout": []}
    cuts = [
        ("train", 0, rows[:32]),
        ("heldout", 0, rows[32 : 32 + heldout // 2]),
        ("heldout", 1, rows[32 + heldout // 2 :]),
    ]
    tokens_of = {name: pyarrow.list_(pyarrow.int32()) for name in ("input_ids", "labels")}
    for split, number, part in cuts:
        file = folder / split / f"{number:05}.parquet"
        file.parent.mkdir(exist_ok=True)
        columns = pyarrow.schema(tokens_of | ({"source": pyarrow.int32()} if split == "heldout" else {}))
        stored = [{**row, "source": at % 2} for at, row in enumerate(part)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(stored, schema=columns), file)
        tokens = sum(len(row["input_ids"]) for row in part)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        shards[split].append(
            Shard(file=f"{split}/{file.name}", samples=len(part), tokens=tokens, sha256=digest)
        )
    manifest(rows, shards).write(folder / "manifest.json")
    return folder


def manifest(rows: list[dict[str, list[int]]], shards: dict[str, list[Shard]]) -> Manifest:
    counts = {
        split: SplitCounts(
            samples=sum(shard.samples for shard in parts),
            tokens=sum(shard.tokens for shard in parts),
            trained_tokens=sum(shard.tokens for shard in parts) // 2,
            shards=parts,
        )
        for split, parts in shards.items()
    }
    lengths = [len(row["input_ids"]) for row in rows]
    bins = [
        Bin(low=low, high=low + 16, samples=sum(low <= length < low + 16 for length in lengths))
        for low in range(0, 160, 16)
    ]
    return Manifest(
        source="pairs.jsonl",
        format="messages",
        rows=len(rows) + 3,
        truncated=2,
        dropped_too_long=0,
        dropped_untrained=3,
        max_length=128,
        longest=max(lengths),
        histogram=bins,
        sources=[
            SourceCounts(
                name=name,
                format="messages",
                weight=1,
                rows=22,
                bad=0,
                samples=22,
                tokens=900,
                trained_tokens=300,
            )
            for name in ("a", "b")
        ],
        train=counts["train"],
        heldout=counts["heldout"],
        tokenizer_sha256="0" * 64,
        content_sha256=content_hash([*shards["train"], *shards["heldout"]]),
    )


def write_trained(folder: Path, recipe: Recipe, dataset: Path, steps: int = 12) -> Path:
    """Write the output of training: model/ or adapter/ after a few plain steps, training.json and
    steps.jsonl."""
    import pyarrow.parquet
    import torch
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    loading.import_libraries()
    model = loading.base_model(recipe, recipe.model.dtype)
    if recipe.method.name != "full":
        from peft import LoraConfig, get_peft_model

        plain = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, loading.peft_config(recipe, model) if recipe.method.experts else plain)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    rows = pyarrow.parquet.read_table(dataset / "train").to_pylist()
    for step in range(steps):
        row = rows[step % len(rows)]
        loss = model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    out = folder / ("model" if recipe.method.name == "full" else "adapter")
    model.save_pretrained(str(out))
    (out / "README.md").unlink(missing_ok=True)
    shutil.copytree(dataset / "tokenizer", out, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(str(out))
    probe.ask(model, probe.tokenized(tokenizer)).write(folder / probe.PROBE)
    export_manifest.write_manifest(recipe, out, None)
    nll, tokens = scoring.heldout_loss(model, heldout_rows(dataset, scoring.GATE_SAMPLES), 0, batch_size=4)
    live = {"heldout_loss": float(nll.sum() / tokens.sum())}
    training = training_result(steps).model_copy(update=live)
    training.write(folder / "training.json")
    (folder / "steps.jsonl").write_text("".join(f"{step.model_dump_json()}\n" for step in training.steps))
    return folder


def write_artifact(folder: Path, recipe: Recipe, dataset: Path, steps: int = 12) -> Path:
    """Write the recipe and the weights of an artifact, and of its records those of training."""
    weights = loading.weights_folder(write_trained(folder, recipe, dataset, steps))
    shutil.copytree(weights, folder, dirs_exist_ok=True)
    shutil.rmtree(weights)
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    return seal(folder)


def seal(artifact: Path) -> Path:
    """Write the artifact.json of the files that are there now, as after a change that its owner made."""
    (artifact / CONTENTS).unlink(missing_ok=True)
    list_all(artifact, "artifact")
    return artifact


def training_result(steps: int, seed: int = 0) -> TrainingResult:
    """Return an invented result: a falling loss, and a learning rate with warm-up and decay."""
    draw = random.Random(seed)
    made = [
        Step(
            step=step,
            epoch=step / 100,
            loss=2.2 + 1.6 * math.exp(-step / 40) + draw.gauss(0, 0.08),
            eval_loss=2.3 + 1.5 * math.exp(-step / 40) if step % 20 == 0 else None,
            learning_rate=2e-4 * min(step / 10, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
            grad_norm=1.0 + draw.random(),
            seconds=2.1 + draw.random() / 4,
            data_seconds=0.02,
            forward_seconds=0.6,
            backward_seconds=1.15,
            update_seconds=0.12,
            eval_seconds=0.15 if step % 20 == 0 else 0.0,
            tokens=draw.randint(1900, 2400),
            tokens_per_second=1000 + 60 * draw.random(),
            memory_bytes=1_510_000_000 + 1_000_000 * min(step, 20),
        )
        for step in range(1, steps + 1)
    ]
    return TrainingResult(
        steps=made,
        seconds=sum(step.seconds for step in made),
        tokens=sum(step.tokens for step in made),
        world_size=2,
        memory_kind="host memory (RSS)",
        trained_parameters=4_884_480,
        total_parameters=139_400_064,
        heldout_loss=2.31,
        peaks={
            "load": 2**30,
            "first step": 3 * 2**30 // 2,
            "steady step": 13 * 2**27,
            "evaluate": 2**30,
            "export": 9 * 2**27,
        },
    )


def plan_for(recipe: Recipe) -> Plan:
    step = {
        "weights (bf16)": 257,
        "gradients": 19,
        "optimizer (8-bit Adam)": 10,
        "activations": 480,
        "logits": 320,
    }
    load = {"weights (bf16)": 257, "process": 700}
    phases = {
        phase: {name: size * 2**20 for name, size in table.items()}
        for phase, table in {
            "load": load,
            "first step": step,
            "steady step": step,
            "evaluate": load,
            "export": load,
        }.items()
    }
    needs = [
        Need(resource="process memory", available_bytes=3 * 2**30, phases=phases),
        Need(resource="disk", available_bytes=20 * 2**30, phases={"export": {"base model": 300 * 2**20}}),
    ]
    return Plan(
        recipe=recipe.name,
        key=recipe.key(),
        shape="cpu-2",
        accelerator="cpu",
        nodes=1,
        processes=2,
        world_size=2,
        global_batch_size=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        needs=needs,
        total_parameters=134_515_584,
        trained_parameters=4_884_480,
        price_per_hour=0.1,
        reasons=[
            "shape cpu-2: as the recipe says",
            "2 x 2 accumulated x 2 processes = 8, the recipe's global batch",
        ],
    )


def copy_tree(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def _chat(tokenizer: Any, index: int) -> dict[str, list[int]]:
    draw = random.Random(index)
    left, right = draw.randrange(100), draw.randrange(100)
    words = " and then" * draw.randrange(12)
    prompt = f"<|im_start|>user\nAdd{words} {left} and {right}.<|im_end|>\n<|im_start|>assistant\n"
    prompt_ids = tokenizer(prompt)["input_ids"]
    answer_ids = tokenizer(f"The sum is {left + right}.{words}<|im_end|>\n")["input_ids"]
    return {"input_ids": prompt_ids + answer_ids, "labels": [-100] * len(prompt_ids) + answer_ids}
