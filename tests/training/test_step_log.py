"""Real runs of a tiny model, and their step log."""

import json

import pytest

from flytune.hardware import shape_named
from flytune.models import scoring
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.records import Step
from flytune.records.plan import EVALUATE, EXPORT, SAVE, STEP
from flytune.training import eval_loss, loop, measurements, step_log
from tests.support import ranks
from tests.support.process_kills import kill_once_saved
from tests.support.stages import write_dataset
from tests.support.tiny import tiny_recipe

PARTS = ("data_seconds", "forward_seconds", "backward_seconds", "update_seconds")
ODD = 7
"""Held-out samples that two processes cannot share evenly."""


def recipe_for(inputs, sharding, folder, **changes):
    changes = {
        "sharding": sharding,
        "training.global_batch_size": 8,
        "checkpoints.folder": str(folder),
    } | changes
    changes |= {"hardware.shape": "cpu-1" if sharding == "none" else "cpu-2"}
    return Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))


def fit(recipe, inputs, out):
    plan = planner.make(recipe)
    share = plan.degrees.samples(recipe.training.global_batch_size)
    plan = plan.model_copy(
        update={"per_device_train_batch_size": 2, "gradient_accumulation_steps": share // 2}
    )
    return loop.fit(recipe, plan, shape_named(plan.shape), inputs / "dataset", out)


def run(recipe, inputs, out, function=fit):
    return ranks.run(planner.make(recipe).world_size, function, recipe, inputs, out)


def lines(file):
    return [Step.model_validate_json(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def scored(inputs, tmp_path_factory):
    """Run a sharding once, scored after steps 2 and 3, on an odd number of samples."""
    done = {}

    def run_once(sharding):
        if sharding not in done:
            folder = tmp_path_factory.mktemp("scored")
            recipe = recipe_for(
                inputs, sharding, folder, **{"evaluation.eval_steps": 2, "evaluation.max_samples": ODD}
            )
            done[sharding] = run(recipe, inputs, folder / "out"), folder / "out"
        return done[sharding]

    return run_once


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "ddp", "zero3", "fsdp"])
def test_the_parts_of_a_step_are_all_there_and_add_up(sharding, scored):
    result, _ = scored(sharding)
    for step in result.steps:
        parts = [getattr(step, name) for name in PARTS]
        assert min(parts) > 0
        assert sum(parts) + step.eval_seconds + step.other_seconds == pytest.approx(step.seconds)
        assert sum(parts) + step.eval_seconds <= step.seconds
        assert (step.eval_seconds > 0) == (step.eval_loss is not None)
        assert step.tokens_per_second == pytest.approx(step.tokens / (step.seconds - step.eval_seconds))
        assert step.memory_bytes > 2**20
        assert step.memory_reserved_bytes is None
    assert sum(step.seconds for step in result.steps) <= result.seconds


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "zero3", "fsdp"])
def test_peaks_by_phase_are_of_the_process_that_held_most(sharding, scored):
    result, _ = scored(sharding)
    assert list(result.peaks) == ["load", "first step", "steady step", "evaluate", "export"]
    assert min(result.peaks.values()) > 2**20
    assert result.steps[-1].memory_bytes <= max(result.peaks.values())
    assert result.reserved_peaks == {}


def hold_in_phases():
    peaks = measurements.Peaks()
    peaks.enter(STEP)
    with peaks.during(SAVE):
        held = bytearray(200 * 2**20)
        del held
    peaks.enter(EXPORT)
    most, _ = peaks.read()
    assert peaks.phase == EXPORT
    return most, peaks.bytes


def hold_in_steps():
    found, peaks = measurements.Peaks(), []
    found.enter(STEP)
    for _ in range(2):
        with found.during(EVALUATE):
            held = bytearray(200 * 2**20)
            del held
        peaks.append(found.read()[0])
        peaks.append(found.read()[0])
    return peaks


def test_the_peak_of_a_step_is_not_reported_for_the_next():
    first, second, third, fourth = ranks.run(1, hold_in_steps)
    assert min(first, third) > max(second, fourth) + 190 * 2**20


def test_the_peak_of_a_phase_is_not_reported_for_another():
    most, held = ranks.run(1, hold_in_phases)
    assert most == held[SAVE] > held[STEP] + 190 * 2**20
    assert held[EXPORT] < held[SAVE] - 190 * 2**20


def fit_and_note(recipe, inputs, out):
    """Return the parts that the clock measured during each kind of work."""
    import torch
    from accelerate.optimizer import AcceleratedOptimizer
    from deepspeed import DeepSpeedEngine
    from transformers import LlamaModel

    noted, clocks = {}, []

    def note(owner, name, work):
        method = getattr(owner, name)

        def noting(self, *args, **kwargs):
            noted.setdefault(work, set()).update(clock._marks[-1][0] for clock in clocks)
            return method(self, *args, **kwargs)

        setattr(owner, name, noting)

    class Clock(measurements.Clock):
        def __init__(self, on_gpu):
            super().__init__(on_gpu)
            clocks.append(self)

    measurements.Clock = Clock
    note(torch.utils.data._utils.fetch._MapDatasetFetcher, "fetch", "fetching")
    note(LlamaModel, "forward", "model")
    note(torch.Tensor, "backward", "gradients")
    note(DeepSpeedEngine, "_take_model_step", "step")
    if recipe.sharding.name != "zero3":
        note(AcceleratedOptimizer, "step", "step")
    fit(recipe, inputs, out)
    return noted


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_each_part_measures_its_work(sharding, inputs, tmp_path):
    recipe = recipe_for(
        inputs, sharding, tmp_path, **{"evaluation.eval_steps": 3, "evaluation.max_samples": 2}
    )
    noted = run(recipe, inputs, tmp_path / "out", fit_and_note)
    # `other`: the gate's samples, after training.
    assert noted == {
        "fetching": {"data"},
        "model": {"forward", "eval", "other"},
        "gradients": {"backward"},
        "step": {"update"},
    }


def test_the_log_is_a_json_object_a_step_beside_training_json(scored):
    result, out = scored("ddp")
    assert lines(out / "steps.jsonl") == result.steps
    assert '"gpu"' not in (out / "steps.jsonl").read_text() + (out / "training.json").read_text()
    first = json.loads((out / "steps.jsonl").read_text().splitlines()[0])
    assert {
        "step",
        "loss",
        "learning_rate",
        "grad_norm",
        "seconds",
        "tokens_per_second",
        "memory_bytes",
        *PARTS,
    } <= set(first)


def test_the_live_model_has_the_same_score_over_any_number_of_processes(scored):
    alone = scored("none")[0]
    assert [step.step for step in alone.steps if step.eval_loss] == [2, 3]
    assert alone.steps[2].eval_loss < alone.steps[1].eval_loss
    # The gate's figure, for the same samples, computed in another way.
    assert alone.steps[2].eval_loss == pytest.approx(alone.heldout_loss, abs=1e-6)
    for sharding in ("ddp", "zero3", "fsdp"):
        losses = [step.eval_loss for step in scored(sharding)[0].steps]
        assert losses[0] is None
        assert losses[1:] == pytest.approx([step.eval_loss for step in alone.steps[1:]], abs=1e-5)


def test_scoring_changes_nothing_and_scored_steps_are_logged(inputs, scored, tmp_path):
    calm = run(recipe_for(inputs, "none", tmp_path / "calm"), inputs, tmp_path / "out")
    assert [step.loss for step in calm.steps] == [step.loss for step in scored("none")[0].steps]
    seldom = {"training.logging_steps": 10, "evaluation.eval_steps": 2, "evaluation.max_samples": ODD}
    result = run(recipe_for(inputs, "none", tmp_path / "seldom", **seldom), inputs, tmp_path / "seldom-out")
    assert [step.step for step in result.steps] == [1, 2, 3]


def test_samples_without_a_token_to_score_are_skipped(inputs, tmp_path):
    import pyarrow
    import pyarrow.parquet

    dataset = write_dataset(tmp_path, inputs / "tiny")
    file = dataset / "heldout" / "00000.parquet"
    table = pyarrow.parquet.read_table(file)
    rows = table.to_pylist()
    rows[1]["labels"] = [scoring.IGNORED] * len(rows[1]["labels"])
    # A label on the first token, which nothing precedes, is not scored.
    rows[2]["labels"] = [5] + [scoring.IGNORED] * (len(rows[2]["labels"]) - 1)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), file)
    assert eval_loss.scored_rows(dataset, 4) == [
        {name: row[name] for name in ("input_ids", "labels")} for row in (rows[0], rows[3])
    ]


def fit_and_die(recipe, inputs, out):
    record = step_log.Recorder.record

    def record_and_die(self, step, epoch, logs):
        record(self, step, epoch, logs)
        if step == 3:
            kill_once_saved(recipe, 2)

    step_log.Recorder.record = record_and_die
    fit(recipe, inputs, out)


def fit_and_count(recipe, inputs, out):
    """Fit, and write what trackers get as the number of tokens so far, by step, beside `out`."""
    record, seen = step_log.Recorder.record, {}

    def record_and_note(self, step, epoch, logs):
        record(self, step, epoch, logs)
        seen[step] = logs["num_tokens"]

    step_log.Recorder.record = record_and_note
    result = fit(recipe, inputs, out)
    (out.parent / "num_tokens.json").write_text(json.dumps(seen))
    return result


def test_the_log_survives_a_killed_run_and_the_next_attempt_continues_it(inputs, tmp_path):
    recipe = recipe_for(
        inputs, "none", tmp_path / "runs", **{"checkpoints.save_steps": 2, "training.max_steps": 4}
    )
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        run(recipe, inputs, tmp_path / "killed", fit_and_die)
    assert not (tmp_path / "killed").exists()
    (log,) = (tmp_path / "runs").glob("*/attempt-*/node-0/steps.jsonl")
    killed = lines(log)
    assert [step.step for step in killed] == [1, 2, 3]
    with log.open("a") as file:
        file.write('{"step": 4, "epo')
    resumed = run(recipe, inputs, tmp_path / "resumed", fit_and_count)
    complete = lines(tmp_path / "resumed" / "steps.jsonl")
    assert complete == killed[:2] + resumed.steps[2:] == resumed.steps
    assert [step.step for step in complete] == [1, 2, 3, 4]
    assert not log.exists()
    tokens = [step.tokens for step in complete]
    assert json.loads((tmp_path / "num_tokens.json").read_text()) == {"3": sum(tokens[:3]), "4": sum(tokens)}


def test_a_run_that_starts_from_the_beginning_starts_a_new_log(tmp_path):
    file = tmp_path / "steps.jsonl"
    file.write_text("left by a run that failed before its first checkpoint\n")
    step_log._cut(file, 0)
    assert file.read_text() == ""


def test_peaks_are_not_read_before_cuda_is_initialized(monkeypatch):
    """A stand-in for a machine with a GPU: torch's own reset_peak_memory_stats raises before CUDA is
    initialized."""
    import torch

    def raises(gpu):
        raise RuntimeError("Invalid device argument 0: did you call init?")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", raises)
    measurements._reset()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="did you call init"):
        measurements._reset()
