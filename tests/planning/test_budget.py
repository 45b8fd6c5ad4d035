"""Budgets: what they count, what a plan says of them, and real runs that they end."""

from types import SimpleNamespace

import pytest

from flytune import data
from flytune.data import heldout_rows
from flytune.hardware import shape_named
from flytune.models import heldout_loss, loading
from flytune.planning import budget as planning_budget
from flytune.planning import planner
from flytune.recipe import Checkpoints, Hardware, Recipe
from flytune.records import TrainingResult
from flytune.training import checkpoints, stopping
from flytune.training.checkpoints.ledger import Checkpoint
from flytune.training.stopping import Stopper
from tests.support import ranks
from tests.support.plans import SMALL, recipe_of
from tests.support.ranks import ALONE, NOTHING_SAVED
from tests.support.saved_runs import fit
from tests.support.tiny import tiny_recipe
from training_estimates import config_sizes


def test_the_scarcer_of_hours_and_money_counts():
    assert planning_budget.of(Hardware(), 10.0) is None
    assert planning_budget.of(Hardware(max_hours=2), 10.0) == (7200, "hardware.max_hours: 2")
    assert planning_budget.of(Hardware(max_hours=2, max_price=10), 10.0) == (3600, "hardware.max_price: 10")
    assert planning_budget.of(Hardware(max_hours=0.5, max_price=10), 10.0) == (
        1800,
        "hardware.max_hours: 0.5",
    )
    assert planning_budget.of(Hardware(max_price=10), 0.0) is None, "machines of one's own cost nothing"


def test_a_plan_says_what_its_budget_does_not_hold():
    def short(hours, **wish):
        return planning_budget.shortfall(Hardware(**wish), 10.0, hours)

    assert short([1.0, 2.0, 3.0], max_hours=3) is None
    assert short([], max_hours=3) is None
    assert short([1.0, 2.0, 3.0]) is None
    assert short([3.0, 4.0, 5.0], max_price=30) == (
        "hardware.max_price: 30 is 3 hours, 4 are planned: training stops after about 75% of its steps, "
        "loading not counted"
    )
    assert "2 are planned: training may stop before its last step" in short([1.0, 2.0, 3.0], max_hours=2.5)


def test_the_note_stands_in_the_plan_on_any_shape():
    recipe, geometry = (
        recipe_of(sharding="ddp", hardware={"accelerator": "H100", "max_hours": 1e-6}),
        config_sizes.geometry(SMALL, "a/b"),
    )
    for wished in (recipe, planner.on_shape(recipe, "auto"), planner.on_shape(recipe, "a10g-8")):
        reasons = planner.make(wished, geometry=geometry, samples=500_000).reasons
        assert [
            reason for reason in reasons if reason.startswith("hardware.max_hours: 1e-06 is 1e-06 hours, ")
        ], reasons
        # Without hours there is nothing to hold against it.
        assert "max_hours" not in str(planner.make(wished, geometry=geometry).reasons)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    return now


def test_the_last_step_is_not_stopped_and_earlier_attempts_count(clock, capsys):
    budget = planning_budget.Budget(100.0, "hardware.max_hours: 0.0278")
    saver = SimpleNamespace(saved_step=0, store_seconds=0.0, resumed_seconds=70.0)
    stopper = Stopper(Checkpoints(save_steps=10), shape_named("cpu-1"), saver, budget)
    clock[0] += 20
    assert stopper.end_step(8, ALONE) == (False, False)
    clock[0] += 20
    assert stopper.end_step(9, ALONE, is_last=True) == (False, False)
    assert stopper.stopped_early is None
    assert stopper.end_step(9, ALONE) == (True, True)
    stopper.end()
    said = "hardware.max_hours: 0.0278 is used up after step 9: 0.0306 of 0.0278 hours; "
    said += "the model is exported and evaluated as it is"
    assert [stopper.stopped_early] == capsys.readouterr().out.splitlines() == [said]


def test_without_checkpoints_nothing_is_saved_and_the_run_still_ends(clock):
    stopper = Stopper(
        Checkpoints(),
        shape_named("cpu-1"),
        NOTHING_SAVED,
        planning_budget.Budget(1.0, "hardware.max_hours: 0.0003"),
    )
    clock[0] += 2
    assert stopper.end_step(1, ALONE) == (False, True)


def agree():
    """Rank 1's clock alone is past the budget at step 3."""
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    saver = SimpleNamespace(saved_step=0, store_seconds=0.0, resumed_seconds=0.0)
    stopper = Stopper(
        Checkpoints(save_steps=10), shape_named("cpu-2"), saver, planning_budget.Budget(100.0, "b")
    )
    args, found = SimpleNamespace(world_size=2, device="cpu"), []
    for step in range(1, 5):
        saver.resumed_seconds = 40.0 * step * torch.distributed.get_rank()
        found.append(stopper.end_step(step, args))
    return found, stopper.has_ended(4, args)


def test_all_ranks_stop_at_the_step_at_which_one_is_past_it():
    assert ranks.run(2, agree) == ([(False, False), (False, False), (True, True), (True, True)], True)


def reloaded_loss(recipe, inputs, out):
    nll, tokens = heldout_loss(
        loading.exported_model(recipe, out), heldout_rows(inputs / "dataset", 8), 0, batch_size=4
    )
    return float(nll.sum() / tokens.sum())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "sharding"), [("full", "fsdp"), ("lora", "zero2")])
def test_a_run_whose_budget_is_used_up_exports_what_there_is(method, sharding, inputs, tmp_path):
    changes = {"method": method, "sharding": sharding, "training.max_steps": 6, "training.logging_steps": 4}
    changes |= {
        "checkpoints.save_steps": 5,
        "checkpoints.folder": str(tmp_path / "kept"),
        "hardware.shape": "cpu-2",
    }
    whole = Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))
    short = whole.model_copy(update={"hardware": Hardware(shape="cpu-2", max_hours=1e-6)})

    result = ranks.run(2, fit, short, inputs, tmp_path / "short")
    assert result.steps[-1].step == 1
    assert "hardware.max_hours: 1e-06 is used up after step 1" in result.stopped_early
    assert result == TrainingResult.read(tmp_path / "short" / "training.json")
    assert reloaded_loss(short, inputs, tmp_path / "short") == pytest.approx(result.heldout_loss, abs=1e-4)
    (manifest,) = (tmp_path / "kept").glob("*/1-*/manifest.json")
    assert Checkpoint.read(manifest).seconds > 0
    # Its artifact is stored, and its checkpoint stays: there is more to train.
    checkpoints.clear(short, data.read_manifest(inputs / "dataset"), result)
    assert manifest.exists()

    # Started again, it has nothing left: what its checkpoint holds is exported at once.
    again = ranks.run(2, fit, short, inputs, tmp_path / "again")
    assert (len(again.steps), again.resumed_from_step) == (1, 1)
    assert again.heldout_loss == pytest.approx(result.heldout_loss, abs=1e-6)
    assert reloaded_loss(short, inputs, tmp_path / "again") == pytest.approx(result.heldout_loss, abs=1e-4)

    # With more to spend, the same run goes on.
    rest = ranks.run(2, fit, whole, inputs, tmp_path / "rest")
    assert (rest.resumed_from_step, rest.steps[-1].step, rest.stopped_early) == (1, 6, None)
