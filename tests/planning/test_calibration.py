"""Calibration by runs: comparisons, factors, the file, and the plans that use them."""

import pytest

from flytune.artifacts.build import compare_with_plan
from flytune.cli import main
from flytune.errors import RecipeError
from flytune.hardware import shape_named
from flytune.planning import calibration, candidates, planner
from flytune.planning.calibration import Factor
from flytune.records import Calibration, Comparison
from tests.support import stages
from tests.support.plans import GEOMETRY, recipe_of

MANIFEST = stages.manifest([{"input_ids": [1] * 9, "labels": [1] * 9}], {"train": [], "heldout": []})
TRAINING = stages.training_result(12)


def comparison(**changes):
    fields = {
        "recipe": "r",
        "shape": "a100-80gb-8",
        "full_length": True,
        "planned_bytes": {"load": 500, "first step": 900, "steady step": 1000},
        "measured_bytes": {"load": 5000, "first step": 1000, "steady step": 1100},
        "planned_step_seconds": 2.0,
        "measured_step_seconds": 2.2,
        "planned_tokens_per_second": 200.0,
        "measured_tokens_per_second": 180.0,
        "calibration": None,
    }
    return Comparison(**(fields | changes))


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """A calibration.yaml of its own."""
    path = tmp_path / "calibration.yaml"
    monkeypatch.setattr(calibration, "CALIBRATION_FILE", path)
    return path


def test_factors_are_medians_of_full_length_runs():
    runs = [
        comparison(),
        comparison(measured_tokens_per_second=100.0),
        comparison(measured_tokens_per_second=190.0),
    ]
    rows = calibration.factors([*runs, comparison(full_length=False, shape="l4-1")])
    assert rows == [Factor(name="a100-80gb-8", memory=1.1, speed=0.9, runs=3)]


def test_a_plan_that_was_calibrated_is_not_corrected_twice():
    used = Calibration(memory=1.1, speed=0.9, runs=1)
    # The plan already said what was measured: the factor stays.
    told = comparison(planned_bytes={"steady step": 1100}, planned_tokens_per_second=180.0, calibration=used)
    assert calibration.factors([told]) == [Factor(name="a100-80gb-8", memory=1.1, speed=0.9, runs=1)]


def test_plans_are_multiplied_and_say_so(kept):
    recipe, shape = recipe_of(sharding="fsdp", hardware={"shape": "a100-80gb-8"}), shape_named("a100-80gb-8")
    before = planner.make(recipe, geometry=GEOMETRY)
    calibration.write([Factor(name="a100-80gb-8", memory=1.5, speed=0.5, runs=2)])
    after = planner.make(recipe, geometry=GEOMETRY)
    assert after.calibration == Calibration(memory=1.5, speed=0.5, runs=2)
    assert (
        "calibrated by 2 runs on this shape (calibration.yaml): memory x 1.50, speed x 0.50" in after.reasons
    )
    micro = after.per_device_train_batch_size
    plain = next(fit for fit in candidates.each(recipe, shape, GEOMETRY) if fit.workload.micro_batch == micro)
    step, outside = after.memory.phases["steady step"], ("CUDA context", "NCCL")
    assert step["optimizer"] == pytest.approx(
        1.5 * before.memory.phases["steady step"]["optimizer"], rel=1e-6
    )
    assert all(step[name] == before.memory.phases["steady step"][name] for name in outside)
    assert after.tokens_per_second[1] == pytest.approx(plain.tokens_per_second)
    if micro == before.per_device_train_batch_size:
        assert after.tokens_per_second[1] == pytest.approx(0.5 * before.tokens_per_second[1])
    other = planner.make(recipe_of(sharding="fsdp", hardware={"shape": "h100-8"}), geometry=GEOMETRY)
    assert other.calibration is None


def test_the_file_keeps_other_shapes_and_is_read_strictly(kept):
    calibration.write(
        [Factor(name="a", memory=1.0, speed=1.0, runs=1), Factor(name="b", memory=1.0, speed=1.0, runs=1)]
    )
    calibration.write([Factor(name="b", memory=1.2, speed=0.8, runs=3)])
    assert {name: row.memory for name, row in calibration.load_factors().items()} == {"a": 1.0, "b": 1.2}
    calibration._read.cache_clear()
    kept.write_text("- {name: a, memory: 1.0, sped: 2, runs: 1}\n")
    with pytest.raises(RecipeError, match="sped: unknown key; did you mean speed"):
        calibration.load_factors()


def test_a_run_is_compared_with_its_plan():
    recipe = recipe_of(data={"path": "x", "packing": True})
    found = compare_with_plan(recipe, stages.plan_for(recipe), MANIFEST, TRAINING)
    assert found.full_length
    assert found.planned_bytes["steady step"] == (257 + 19 + 10 + 480 + 320) * 2**20
    assert found.memory_ratio == pytest.approx(13 * 2**27 / ((257 + 19 + 10 + 480 + 320) * 2**20))
    assert (found.speed_ratio, found.planned_step_seconds) == (None, None), "a CPU's speed is not planned"
    later = TRAINING.steps[1:]
    assert found.measured_step_seconds == pytest.approx(
        sum(step.seconds - step.eval_seconds for step in later) / len(later)
    )
    # Short samples, whether the longest are trained first or not.
    for probes in (False, True):
        training = {"learning_rate": 1e-4, "global_batch_size": 8, "probe_longest": probes}
        shorter = compare_with_plan(recipe_of(training=training), stages.plan_for(recipe), MANIFEST, TRAINING)
        assert (shorter.full_length, shorter.memory_ratio) == (False, None)


def test_the_command_line_learns_from_a_folder_of_artifacts(tmp_path, kept, capsys):
    for number in range(2):
        folder = tmp_path / "artifacts" / str(number)
        folder.mkdir(parents=True)
        comparison(recipe=f"run-{number}").write(folder / "comparison.json")
    assert main(["calibrate", str(tmp_path / "artifacts")]) == 0
    shown = capsys.readouterr().out
    assert "run-1" in shown
    assert "a100-80gb-8: memory x 1.10, speed x 0.90 (median of 2)" in shown
    assert calibration.load_factors()["a100-80gb-8"].runs == 2
    assert main(["calibrate", str(tmp_path / "none")]) == 1
    assert "none: no such folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["calibrate", str(tmp_path / "empty")]) == 1
    assert "no comparison.json below" in capsys.readouterr().err
