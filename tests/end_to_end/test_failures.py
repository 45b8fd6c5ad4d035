"""Tests of failing ranks in a pod: the console's text, Flyte's retries, and the next attempt."""

import contextlib
import re
from pathlib import Path

import pytest
from flytekit.models.core.errors import ContainerError
from flytekit.types.directory import FlyteDirectory

from flytune.failures.table import RETRIES
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.records import TrainingResult
from tasks.train import TRAIN
from tests.support.faults import planted
from tests.support.pods import PodKilled, pod
from tests.support.tiny import tiny_recipe

pytestmark = pytest.mark.slow

RECOVERABLE = ContainerError.Kind.RECOVERABLE


@pytest.fixture
def attempt(inputs, tmp_path, monkeypatch, request):
    """A function that runs attempts of one run, each with a fault ("FAULT RANKS STEP"); those of a journey
    are forked."""
    forks, done = request.node.get_closest_marker("journey") is not None, []

    def make(fault="", **changes):
        changes = {
            "checkpoints.folder": str(tmp_path / "checkpoints"),
            "training.global_batch_size": 8,
        } | changes
        changes = {"sharding": "ddp", "hardware.shape": "cpu-2", "training.max_steps": 4} | changes
        recipe = Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))
        plan = planner.make(recipe)
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", str(len(done)))
        for name, value in planted(fault).items():
            monkeypatch.setenv(name, value)
        dataset = FlyteDirectory(str(inputs / "dataset"))
        folder = tmp_path / f"attempt{len(done)}"
        done.append(None)
        done[-1] = pod(TRAIN[plan.shape], folder, forks=forks, recipe=recipe, plan=plan, dataset=dataset)
        return getattr(done[-1], "error", None) or TrainingResult.read(
            Path(done[-1]["o0"].download()) / "training.json"
        )

    return make


def test_every_train_task_has_the_retries_of_the_table():
    assert {task.metadata.retries for task in TRAIN.values()} == {RETRIES}


def test_a_bug_is_final_and_reported_with_its_rank_and_traceback(attempt):
    error = attempt("bug 1 2")
    assert error.kind != RECOVERABLE
    first, second, third, *_ = error.message.splitlines()
    assert first == "train_cpu_2 failed: rank 1: bug: KeyError: 'a bug'"
    assert second.startswith("what to do: ")
    assert third == "the run does not go on by itself"
    assert "in strike" in error.message
    assert "peer gone" not in error.message


def test_a_killed_rank_is_named_and_retried(attempt):
    error = attempt("kill 1 2")
    assert error.kind == RECOVERABLE
    assert error.message.startswith("train_cpu_2 failed: rank 1: out of host memory: ended by SIGKILL")
    assert "recoverable: attempt 1 of 4; Flyte starts another" in error.message
    assert "peer gone" not in error.message


def test_a_pod_that_is_killed_twice_in_the_same_phase_is_not_retried(attempt, monkeypatch):
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "abc")
    alone = {"sharding": "none", "hardware.shape": "cpu-1"}
    # Killed in different phases; ended by SIGTERM twice; killed in the same phase twice.
    for fault in ("kill 0 1", "kill 0 2", "preempt 0 2", "preempt 0 2", "kill 0 2", "kill 0 2"):
        with contextlib.suppress(PodKilled):
            assert attempt(fault, **alone).kind == RECOVERABLE
    error = attempt(**alone)
    assert error.kind != RECOVERABLE
    first, second, *_ = error.message.splitlines()
    assert first.startswith("train_cpu_1 failed: ")
    assert "attempts 5 and 6 were killed without a report in the same phase, steady step, at " in first
    assert re.search(r"at \d+\.\d and \d+\.\d of the \d+\.\d GiB .* \(the plan had \d+\.\d GiB\)", first)
    assert second.startswith("what to do: a shape with more memory_gib")
    # Another execution may try again.
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "def")
    assert len(attempt(**alone).steps) == 4


def test_a_rank_that_is_killed_twice_in_the_same_phase_is_not_retried(attempt, monkeypatch):
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "abc")
    for _ in range(2):
        assert attempt("kill 1 2").kind == RECOVERABLE
    error = attempt()
    assert error.kind != RECOVERABLE
    assert (
        "attempts 1 and 2 were killed without a report in the same phase, steady step"
        in error.message.splitlines()[0]
    )


def test_a_full_gpu_is_final_unless_the_recipe_takes_a_smaller_micro_batch(attempt):
    error = attempt("memory 1 2")
    assert error.kind != RECOVERABLE
    assert "rank 1: out of GPU memory at step 3, 4 x 1 accumulated x 2 processes" in error.message
    auto = {"training.auto_find_batch_size": True}
    error = attempt("memory 1 2", **auto)
    assert error.kind == RECOVERABLE
    assert "2 x 2 x 2 processes is the same global batch of 8, and the next attempt uses it" in error.message
    halved, whole = attempt(**auto), attempt(**auto, **{"training.seed": 42, "name": "whole"})
    assert [step.loss for step in halved.steps] == pytest.approx(
        [step.loss for step in whole.steps], abs=1e-5
    )


@pytest.mark.journey
def test_sigterm_saves_at_one_step_of_all_ranks_and_the_next_attempt_resumes(attempt):
    error = attempt("preempt 0 2", **{"checkpoints.save_steps": 50})
    assert error.kind == RECOVERABLE
    assert re.search(r"preempted: SIGTERM: step 2 is saved, \d+\.\d s of 30 were left", error.message)
    resumed, whole = attempt(**{"checkpoints.save_steps": 50}), attempt(name="whole")
    assert resumed.resumed_from_step == 2
    assert [step.loss for step in resumed.steps] == [step.loss for step in whole.steps]


def test_sigterm_without_checkpoints_ends_at_once_and_reports_the_lost_steps(attempt):
    error = attempt("preempt 0 3", sharding="none", **{"hardware.shape": "cpu-1"})
    assert error.kind == RECOVERABLE
    assert "SIGTERM after step 2: checkpoints.save_steps is not set; steps 1 to 2 are lost" in error.message


def test_a_hang_ends_with_a_stack_of_each_rank(attempt):
    error = attempt("hang 1 2")
    assert error.kind == RECOVERABLE
    assert "hang: nothing finished for " in error.message
    stacks = error.message.partition("rank 0:\n")[2]
    waits, sleeps = stacks.split("rank 1:\n")[:2]
    assert "all_reduce" in waits
    assert "in strike" in sleeps
    assert "time.sleep(600)" in sleeps


def test_a_hang_of_a_single_process_is_reported_too(attempt):
    error = attempt("hang 0 2", sharding="none", **{"hardware.shape": "cpu-1"})
    assert error.kind == RECOVERABLE
    assert "time.sleep(600)" in error.message
