"""Real runs that export the checkpoint of the lowest eval_loss, which a planted score or a learning rate that
is far too high makes the first."""

import itertools
import re
import time

import pytest

from flytune import data
from flytune.hardware import shape_named
from flytune.models import loading, scoring
from flytune.objectives.bound import BoundRecipe
from flytune.planning import planner
from flytune.sharding import sharding_of
from flytune.training import checkpoints, eval_loss, trainer
from tests.support import ranks
from tests.support.saved_runs import fit, fit_and_die_in_the_export, recipe_for


def best_of(inputs, method, sharding, folder, **changes):
    adapter = {} if method == "full" else {"lora_dropout": 0.0}
    usual = {
        "method": {"name": method} | adapter,
        "training.learning_rate": 0.1 if method == "full" else 0.9,
        "training.lr_scheduler_type": "constant",
        "training.warmup_steps": 0,
        "training.max_steps": 2,
        "evaluation.eval_steps": 1,
        "checkpoints.export": "best",
    }
    if sharding == "device_map":
        usual |= {"hardware.shape": "cpu-1", "model.dtype": "bfloat16"}
    return recipe_for(inputs, sharding, folder, **usual | changes)


def fit_with_a_worse_second_score(recipe, inputs, out):
    """Run once; from the second evaluation on each loss is 10 nats above the model's."""
    measured, evaluations = eval_loss.live_loss, itertools.count()

    def planted(*arguments):
        return measured(*arguments) + (10 if next(evaluations) else 0)

    eval_loss.live_loss = planted
    return fit(recipe, inputs, out)


def reloaded_loss(recipe, inputs, out):
    nll, tokens = scoring.heldout_loss(
        loading.exported_model(recipe, out), data.heldout_rows(inputs / "dataset", 8), 0, batch_size=4
    )
    return float(nll.sum() / tokens.sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sharding"), [("full", "fsdp"), ("full", "zero3"), ("lora", "fsdp"), ("qlora", "device_map")]
)
def test_the_exported_weights_are_those_of_the_lowest_loss(method, sharding, inputs, tmp_path):
    recipe = best_of(inputs, method, sharding, tmp_path / "kept")
    processes = planner.make(recipe).world_size
    result = ranks.run(processes, fit_with_a_worse_second_score, recipe, inputs, tmp_path / "out")
    losses = [step.eval_loss for step in result.steps]
    assert losses.index(min(losses)) == 0 < len(losses) - 1
    assert (result.exported_step, result.exported_eval_loss) == (1, losses[0])
    assert result.heldout_loss == losses[0], (
        "the gate and the probe compare with the weights that are exported"
    )
    assert ranks.run(1, reloaded_loss, recipe, inputs, tmp_path / "out") == pytest.approx(losses[0], abs=1e-2)


def test_a_run_is_saved_and_scored_at_the_end_of_each_epoch(inputs, tmp_path):
    rows = data.read_manifest(inputs / "dataset").train.samples
    epochs = {"training.max_steps": None, "training.num_train_epochs": 2, "training.global_batch_size": 16}
    each = {
        "checkpoints.save_steps": "epoch",
        "evaluation.eval_steps": "epoch",
        "training.logging_steps": 100,
    }
    recipe = best_of(inputs, "full", "none", tmp_path / "kept", **epochs, **each)
    result = ranks.run(1, fit, recipe, inputs, tmp_path / "out")
    ends = [-(-rows // 16), -(-2 * rows // 16)]
    scored = [step.step for step in result.steps if step.eval_loss is not None]
    stored = sorted(
        int(path.parent.name.partition("-")[0]) for path in tmp_path.glob("kept/*/*/manifest.json")
    )
    assert (scored, stored) == (ends, ends)
    assert result.exported_step in ends


def test_a_run_is_saved_and_scored_at_each_share_of_its_steps(inputs, tmp_path):
    share = {"checkpoints.save_steps": 0.25, "evaluation.eval_steps": 0.25, "checkpoints.save_total_limit": 9}
    recipe = best_of(
        inputs,
        "full",
        "none",
        tmp_path / "kept",
        **share,
        **{"training.max_steps": 7, "training.logging_steps": 9},
    )
    result = ranks.run(1, fit, recipe, inputs, tmp_path / "out")
    scored = [step.step for step in result.steps if step.eval_loss is not None]
    stored = sorted(
        int(path.parent.name.partition("-")[0]) for path in tmp_path.glob("kept/*/*/manifest.json")
    )
    assert (scored, stored) == ([2, 4, 6, 7], [2, 4, 6, 7])


def collective_that_rank_1_does_not_reach(recipe, inputs, out):
    import torch.distributed

    plan = planner.make(recipe)
    args = trainer.arguments(BoundRecipe(recipe), plan, shape_named(plan.shape), out)
    sharding_of(recipe).before_load("cpu")
    if args.process_index == 1:
        return time.sleep(60)
    return torch.distributed.all_reduce(torch.ones(1))


@pytest.mark.parametrize("sharding", ["ddp", "zero3"])
def test_the_timeout_reaches_the_process_group(sharding, inputs, tmp_path):
    recipe = recipe_for(inputs, sharding, tmp_path, **{"training.ddp_timeout": 2})
    with pytest.raises(ranks.RankFailed, match="rank 0: (?s:.*)[Tt]imed out waiting 2000ms"):
        ranks.run(2, collective_that_rank_1_does_not_reach, recipe, inputs, tmp_path)


@pytest.mark.slow
def test_best_and_early_stopping_survive_two_kills(inputs, tmp_path, capfd):
    settings = {"training.max_steps": 9, "evaluation.early_stopping_patience": 3}
    recipe = best_of(inputs, "full", "ddp", tmp_path / "kept", **settings)
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(2, fit, recipe, inputs, tmp_path / "killed", 1, 3)
    assert sorted(
        path.name[0] for path in tmp_path.glob("kept/*/*-*") if (path / "manifest.json").exists()
    ) == ["1", "2"]
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(2, fit_and_die_in_the_export, recipe, inputs, tmp_path / "killed again")
    # The newest two, and the best: the count of evaluations went on, so that no step after the fourth was
    # trained.
    kept = sorted(path.parent.name[0] for path in tmp_path.glob("kept/*/*/manifest.json"))
    assert kept == ["1", "3", "4"]
    result = ranks.run(2, fit, recipe, inputs, tmp_path / "out")
    assert (result.resumed_from_step, [step.step for step in result.steps], result.exported_step) == (
        4,
        [1, 2, 3, 4],
        1,
    )
    # Killed at step 3 with step 2 saved, which the killed process may not have recorded yet; then in the
    # export.
    assert len(result.attempts) == 3
    assert result.repeated_steps == result.attempts[0].last_step - 2 in (0, 1)
    assert result.heldout_loss == result.exported_eval_loss
    assert "3 evaluations in a row did not lower eval_loss" in result.early_stopping
    assert result.early_stopping.endswith("at step 1); training ended after step 4")
    assert result.exported.startswith("step 1 of 4, eval_loss ")
    assert re.search(r"exports step 1 of 4: eval_loss \d[\d.]*, the lowest", capfd.readouterr().out)
    assert result.stopped_early is None, "the checkpoints of a complete run are deleted"
    checkpoints.clear(recipe, data.read_manifest(inputs / "dataset"), result)
    assert list((tmp_path / "kept").iterdir()) == []
