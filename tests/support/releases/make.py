"""Recipe, artifact and checkpoint of a release, stored so that later releases can be tested against them.

    python -m tests.support.releases.make FOLDER

FOLDER holds recipe.yaml (every field) and recipe-train.yaml (what is trained); all else is written beside
them.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from flytune import data
from flytune.artifacts import build
from flytune.evaluation import score
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.records import TrainingResult
from flytune.selftest import tiny_model
from flytune.training import loop
from tests.support import ranks
from tests.support.process_kills import kill_once_saved
from tests.support.tiny import write_pairs

KILLED_AFTER = 2
"""Step of the checkpoint that the killed run leaves."""


def make(folder: Path) -> None:
    """Write base/, data.jsonl, dataset/, artifact/, checkpoint/ and recipe.json into `folder`; paths are
    relative to it."""
    os.chdir(folder)
    Path("recipe.json").write_text(
        Recipe.from_yaml("recipe.yaml").model_dump_json(indent=2) + "\n", encoding="utf-8"
    )
    full = Recipe.from_yaml("recipe-train.yaml")
    write_base(Path("base"))
    write_pairs(Path("data.jsonl"), 48)
    data.prepare(request_of(full), Path("dataset"))
    try:
        ranks.run(1, fit_and_die, full, Path("scratch/full"))
    except ranks.RankFailed as error:
        print(f"as intended: {error}")  # noqa: T201
    # Last: ranks are forked, and a process whose torch has computed has threads that a fork does not take
    # along.
    make_artifact(lora(full), Path("scratch/lora"))
    shutil.rmtree("scratch")


def write_base(folder: Path) -> None:
    """Write a Llama of about 7,000 random weights with a tokenizer of 288 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_model.train_tokenizer(tiny_model.SENTENCES, 288)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def request_of(recipe: Recipe) -> DataRequest:
    return DataRequest(model=recipe.model, data=recipe.data, fingerprint=data.fingerprint(recipe.data))


def lora(full: Recipe) -> Recipe:
    """Return the recipe of the stored artifact: the full one's with an adapter and without checkpoints."""
    method = {"name": "lora", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0}
    changed = {"name": "release-lora", "method": method, "checkpoints": {}}
    changed["training"] = full.training.model_dump() | {"learning_rate": 1e-2}
    return Recipe.model_validate(full.model_dump() | changed)


def make_artifact(recipe: Recipe, scratch: Path) -> None:
    ranks.run(1, fit, recipe, scratch)
    metrics = score.score(recipe, scratch, Path("dataset"))
    build.store(recipe, planner.make(recipe), Path("dataset"), scratch, metrics, Path("artifact"))


def fit(recipe: Recipe, out: Path) -> TrainingResult:
    plan = planner.make(recipe)
    return loop.fit(recipe, plan, shape_named(plan.shape), Path("dataset"), out)


def fit_and_die(recipe: Recipe, out: Path) -> None:
    """Train until the first forward pass after the checkpoint, and be killed there."""
    from transformers import Trainer

    step = Trainer.training_step

    def step_or_die(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.state.global_step == KILLED_AFTER:
            kill_once_saved(recipe, KILLED_AFTER)
        return step(self, *arguments, **named)

    Trainer.training_step = step_or_die
    fit(recipe, out)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
