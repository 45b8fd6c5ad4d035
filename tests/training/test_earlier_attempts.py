"""Figures of runs that lose their machines: of all attempts together."""

from types import SimpleNamespace

import pytest

from flytune import data
from flytune.artifacts.build import compare_with_plan
from flytune.artifacts.reproduction import _losses
from flytune.planning import planner
from flytune.records import Attempt, Step, TrainingResult
from flytune.training import checkpoints, earlier_attempts, step_log
from tests.support import ranks
from tests.support.saved_runs import fit, fit_and_die_in_the_export, recipe_for


def figures(steps):
    """Return what an uninterrupted run has bit for bit."""
    return [
        (step.step, step.loss, step.eval_loss, step.grad_norm, step.learning_rate, step.tokens)
        for step in steps
    ]


@pytest.mark.slow
def test_all_figures_of_a_run_killed_twice_are_of_all_attempts(inputs, tmp_path, capfd):
    recipe = recipe_for(inputs, "ddp", tmp_path / "kept", **{"evaluation.eval_steps": 2})
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(2, fit, recipe, inputs, tmp_path / "killed", 1, 3)
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(2, fit_and_die_in_the_export, recipe, inputs, tmp_path / "killed again")
    # With nothing left to train.
    resumed = ranks.run(2, fit, recipe, inputs, tmp_path / "resumed")
    said = capfd.readouterr().out
    calm = recipe_for(inputs, "ddp", tmp_path / "calm", **{"evaluation.eval_steps": 2})
    whole = ranks.run(2, fit, calm, inputs, tmp_path / "whole")

    assert (
        figures(resumed.steps)
        == figures(whole.steps)
        == figures(step_log.read(tmp_path / "resumed" / "steps.jsonl"))
    )
    assert (resumed.tokens, resumed.heldout_loss, resumed.exported) == (
        whole.tokens,
        whole.heldout_loss,
        whole.exported,
    )
    # The record is written beside training: that of a killed process may be a step late, but not behind its
    # checkpoint.
    again = resumed.attempts[0].last_step - 2
    assert again in (0, 1)
    assert [(attempt.resumed_from_step, attempt.last_step) for attempt in resumed.attempts] == [
        (0, 2 + again),
        (2, 4),
        (4, 4),
    ]
    assert (resumed.repeated_steps, whole.repeated_steps, len(whole.attempts)) == (again, 0, 1)
    assert resumed.seconds == pytest.approx(sum(attempt.seconds for attempt in resumed.attempts))
    assert resumed.held_seconds > resumed.seconds
    assert all(
        resumed.peaks[phase] >= attempt.peaks.get(phase, 0)
        for attempt in resumed.attempts
        for phase in resumed.peaks
    )
    assert _losses(resumed.steps, whole.steps).result == "equal"
    assert "3 attempts: 4 steps in 0:0" in said
    assert ("1 trained again" in said) == (again == 1)
    plan, manifest = planner.make(recipe), data.read_manifest(inputs / "dataset")
    assert compare_with_plan(recipe, plan, manifest, resumed).measured_step_seconds > 0
    checkpoints.clear(recipe, manifest, resumed)
    assert list((tmp_path / "kept").iterdir()) == []


_ROW = {"shape": "cpu-1", "world_size": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
_ROW |= {"price_per_hour": 36.0, "seconds": 1.0, "held_seconds": 2.0}


def row(number, first, last):
    return Attempt(number=number, resumed_from_step=first, last_step=last, **_ROW)


def covered(*spans, held_seconds=6.0):
    """Return the records of attempts that resumed and ended at these steps; each step takes 2.5 s, and the
    last one resumes."""
    *found, mine = (row(number, first, last) for number, (first, last) in spans)
    steps = [SimpleNamespace(step=step, seconds=2.5) for step in range(1, mine.last_step + 1)]
    return earlier_attempts.covering(found, mine, steps, held_seconds)


def test_an_attempt_without_a_record_counts_as_far_as_its_checkpoint():
    (before,) = covered((2, (4, 6)), held_seconds=15.0)
    assert (before.last_step, before.seconds, before.held_seconds) == (4, 10.0, 15.0)


@pytest.mark.parametrize(
    ("spans", "trained", "seconds"),
    [
        ([(0, 1), (2, 2), (2, 4), (4, 6)], [(0, 2), (2, 2), (2, 4)], [5.0, 1.0, 5.0]),
        # Step 3 was trained, lost, and trained again by an attempt whose record has only its start.
        ([(0, 3), (2, 2), (3, 6)], [(0, 3), (2, 3)], [5.0, 2.5]),
        # The second one could not read the checkpoints.
        ([(0, 1), (0, 0), (2, 6)], [(0, 2), (0, 0)], [5.0, 1.0]),
        ([(0, 5), (4, 4), (4, 6)], [(0, 5), (4, 4)], [10.0, 1.0]),
    ],
)
def test_a_record_that_is_late_counts_as_far_as_the_next_attempt_s_checkpoint(spans, trained, seconds):
    found = covered(*enumerate(spans))
    assert [(one.resumed_from_step, one.last_step) for one in found] == trained
    assert [one.seconds for one in found] == seconds
    assert all(one.held_seconds >= one.seconds for one in found)
    steps = [Step.model_construct(step=step) for step in range(1, 7)]
    result = TrainingResult.model_construct(steps=steps, attempts=[*found, row(len(spans) - 1, *spans[-1])])
    assert [step.step for attempt in result.attempts for step in result.steps_of(attempt)] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
