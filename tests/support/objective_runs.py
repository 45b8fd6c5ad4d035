"""Runs of a tiny model on data of an objective, and on the same rows with TRL's own trainer."""

import contextlib
import io
import json
import os
import re

import pytest

from flytune import data
from flytune.hardware import shape_named
from flytune.objectives import objective_of
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.report import model_card
from flytune.training import loop, reference
from tests.support import prompts, ranks, saved_runs
from tests.support.changed_base import write_teacher
from tests.support.tiny import tiny_base, tiny_recipe

SECTIONS = {"grpo": prompts.section()}
"""Sections of objectives whose defaults are not a tiny run's."""
ON_POLICY = "distill on_policy"
"""Name of distillation in these runs whose student draws answers."""
TEACHER = "teacher"
"""Folder beside the base with a teacher of other weights."""


def section_of(objective, inputs):
    """Return the section of an objective, a name or a section already, of a run whose inputs are in a
    folder."""
    if objective in ("distill", ON_POLICY):
        section = {"name": "distill", "teacher_model_name_or_path": str(inputs / TEACHER), "loss_top_k": 8}
        return section | ({"on_policy": 0.5, "max_completion_length": 12} if objective == ON_POLICY else {})
    return SECTIONS.get(objective, {"name": objective}) if isinstance(objective, str) else objective


SAME = 1e-5
"""Relative difference of losses that are computed in the same order."""


def prepare(folder, objective, write):
    """Make a tiny base model, 64 rows with `write`, and the prepared data of an objective, all in
    `folder`."""
    base, rows = tiny_base(folder), write(folder / "pairs.jsonl", 64)
    write_teacher(base, folder / TEACHER)
    prepared_for = "distill" if objective == ON_POLICY else objective
    recipe = Recipe.model_validate(tiny_recipe(base, rows, {"objective": prepared_for}))
    data.prepare(DataRequest.of(recipe, "x"), folder / "dataset")
    named = recipe_for(folder, objective)
    if objective_of(named).teacher():
        ranks.run(1, reference.compute, named, folder / "dataset", folder / saved_runs.KNOWN)
    return folder


def recipe_for(inputs, default, method="full", sharding="none", **changes):
    """Return the recipe of a tiny run; `default` is its objective, where `changes` have none."""
    method = method if method == "full" else {"name": method, "lora_dropout": 0.0}
    changes = {"objective": section_of(default, inputs), "method": method, "sharding": sharding} | changes
    changes |= {"hardware.shape": "cpu-1" if sharding == "none" else "cpu-2"}
    return Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))


def fit(recipe, inputs, out, layout=None):
    """Train as planned, or with another micro batch and accumulation."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    plan = planner.make(recipe).model_copy(update=dict(zip(names, layout or (), strict=bool(layout))))
    known = saved_runs.known(recipe, inputs)
    return loop.fit(recipe, plan, shape_named(plan.shape), inputs / "dataset", out, reference=known)


def causal(recipe):
    """Return the base model, and the adapter's configuration, as TRL's own trainer gets them."""
    from transformers import AutoModelForCausalLM

    from flytune.models import loading

    model = AutoModelForCausalLM.from_pretrained(recipe.model.name_or_path, dtype="float32")
    return model, loading.peft_config(recipe, model)


def three_steps(training, out):
    """Return the arguments of transformers' Trainer for three steps as a recipe's section says."""
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": training.global_batch_size,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler_type,
        "warmup_steps": training.warmup_steps,
        "max_grad_norm": training.max_grad_norm,
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "seed": training.seed,
    }


def logs_of_trl(make_config, make_trainer, recipe, rows, out, load=causal):
    """Return the logs of three steps of TRL's own trainer, which tokenizes the texts itself, with the rows in
    their order."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, set_seed

    torch.set_num_threads(1)
    training, objective, folder = recipe.training, recipe.objective, recipe.model.name_or_path
    own = {"bf16": False, "gradient_checkpointing": False, "max_length": None}
    args = make_config(objective, **three_steps(training, out), **own)
    model, adapter = load(recipe)
    set_seed(training.seed)
    trainer = make_trainer(
        model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=adapter,
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def in_order_of_training(recipe, inputs, key_of_text, key_of_row, rows="answers"):
    """Return the rows of text in the order in which a run trains them, found by a key of their texts and
    tokens."""
    stored = data.order.Stream(data.load(inputs / "dataset", "train"), recipe.training, data.row_kind(rows))
    tokenizer = data.load_tokenizer(recipe.model, recipe.data)

    def ids(text):
        return tokenizer(text + tokenizer.eos_token)["input_ids"]

    texts = [json.loads(line) for line in (inputs / "pairs.jsonl").read_text().splitlines()]
    by_key = {key_of_text(row, ids): row for row in texts}
    return [by_key[key_of_row(stored[place])] for place in range(len(stored))]


def check_losses(recipe, inputs, tmp_path, fit, losses_of_trl):
    """Check that a run on pairs has the losses of TRL's own trainer on the same pairs, and that they fall."""
    rows = pairs_in_order_of_training(recipe, inputs)
    ours = ranks.run(1, fit, recipe, inputs, tmp_path / "ours")
    theirs = ranks.run(1, losses_of_trl, recipe, rows, tmp_path / "theirs")
    assert len(theirs) == len(ours.steps) == 3
    assert [step.loss for step in ours.steps] == pytest.approx(theirs, rel=SAME)
    assert ours.steps[2].loss != pytest.approx(ours.steps[0].loss, rel=1e-3), "it learned"


def check_sharding(recipe_of, sharding, inputs, tmp_path):
    """Check that two processes have the losses and gradient norms of one; `recipe_of` takes a sharding."""
    alone, together = (
        ranks.run(count, fit, recipe_of(name), inputs, tmp_path / name)
        for count, name in ((1, "none"), (2, sharding))
    )
    for name in ("loss", "grad_norm"):
        of_one, of_two = ([getattr(step, name) for step in run.steps] for run in (alone, together))
        assert of_two == pytest.approx(of_one, rel=1e-3), name
    assert together.heldout_loss == pytest.approx(alone.heldout_loss, rel=1e-3)


def check_resume(inputs, sharding, tmp_path, **changes):
    """Check that a run that is killed at step 3 of 4 computes what an undisturbed one does."""
    changes = {"evaluation.eval_steps": 2} | changes
    if "objective" in changes:
        changes["objective"] = section_of(changes["objective"], inputs)
    recipe = saved_runs.recipe_for(inputs, sharding, tmp_path / "kept", **changes)
    world_size = planner.make(recipe).world_size
    calm = recipe.model_copy(
        update={"checkpoints": recipe.checkpoints.model_copy(update={"save_steps": None})}
    )
    never = ranks.run(world_size, saved_runs.fit, calm, inputs, tmp_path / "calm")
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(world_size, saved_runs.fit, recipe, inputs, tmp_path / "killed", 1, 3)
    resumed = ranks.run(world_size, saved_runs.fit, recipe, inputs, tmp_path / "resumed")
    assert resumed.resumed_from_step == 2
    assert [step.loss for step in resumed.steps] == [step.loss for step in never.steps], (
        "those of both attempts"
    )
    assert resumed.steps[-1].eval_loss == never.steps[-1].eval_loss, (
        "the reference is the base, not the checkpoint"
    )
    assert resumed.heldout_loss == never.heldout_loss


def pairs_in_order_of_training(recipe, inputs):
    """Return the pairs of text in the order in which a run trains them."""

    def key(text, ids):
        return tuple(ids(text["prompt"] + text["chosen"]) + ids(text["prompt"] + text["rejected"]))

    return in_order_of_training(recipe, inputs, key, lambda row: tuple(row["input_ids"]), rows="pairs")


def card_of(recipe, result, out, inputs, metrics):
    """Return the model card of a run."""
    plan, manifest = planner.make(recipe), data.read_manifest(inputs / "dataset")
    return model_card.render(recipe, plan, manifest, result, metrics, broken=[])


def run_card(card, weights, dataset):
    """Run the card's code in a folder with the weights, and return what it prints."""
    os.chdir(weights)
    os.symlink(dataset, "dataset")
    code = "\n".join(re.findall(r"```python\n(.*?)```", card, re.DOTALL)[:2])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    return printed.getvalue()
