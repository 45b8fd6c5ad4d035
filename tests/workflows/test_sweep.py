"""Tests of sweeps: points of a recipe, their comparison, and the workflow."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from flytekit import task
from rich.console import Console

from flytune.errors import DataError, RecipeError
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.registry import history
from flytune.stages.planned import Run, Running
from flytune.stages.points import failure_reason
from flytune.sweeps import Outcome, results
from flytune.sweeps import grid as sweeps_grid
from flytune.sweeps.results import Sweep
from tasks.promote import rollback_accepted
from tasks.runtime.mapping import map_points
from tasks.runtime.orchestrator import FLYTE
from tests.chaos.pods import fill_command, write_inputs
from tests.support.decisions import decision
from tests.support.paths import ROOT
from tests.support.plans import recipe_of
from tests.support.preferences import write_preferences
from tests.support.registration import SETTINGS
from tests.support.stages import plan_for
from tests.support.sweeps import check_table, drawn, score
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_base(folder), write_pairs(folder / "pairs.jsonl", 64)


def test_a_grid_yields_all_combinations_as_recipes_with_different_names():
    points = drawn({"training.learning_rate": [1e-4, "2e-4"], "training.seed": [1, 2.0, 3]}).points
    assert [(point.recipe.training.learning_rate, point.recipe.training.seed) for point in points] == [
        (rate, seed) for rate in (1e-4, 2e-4) for seed in (1, 2, 3)
    ]
    base = recipe_of()
    assert [point.recipe.name for point in points] == [f"{base.name}-{number}" for number in range(1, 7)]
    for one in points:
        assert one.recipe.model_copy(update={"name": base.name, "training": base.training}) == base


def test_sections_may_be_names_or_fields_and_checkpoints_differ():
    recipe = recipe_of(name="a" * 63, checkpoints={"name": "kept"})
    first, second = drawn(
        changes=[{"method": "lora", "method.r": 8}, {"method": {"name": "full"}}], recipe=recipe
    ).points
    assert (first.recipe.method.name, first.recipe.method.r, second.recipe.method.name) == ("lora", 8, "full")
    assert first.recipe.name == "a" * 61 + "-1"
    assert [one.recipe.checkpoints.name for one in (first, second)] == ["kept-1", "kept-2"]
    assert sweeps_grid.value_at(second.recipe, "method") == "full"
    assert sweeps_grid.value_at(first.recipe, "method") == {"name": "lora", "r": 8}
    assert sweeps_grid.value_at(first.recipe, "checkpoints.folder.x") is None


@pytest.mark.parametrize(
    ("grid", "changes", "message"),
    [
        ({}, [], "give a grid .* or a list of changes .*; none is given"),
        ({"training.seed": [1]}, [{"training.seed": 1}], "both are given"),
        (
            {"training.seed": 3, "training.max_steps": [1, 1]},
            [],
            r"training.seed: a grid has a list .*; found 3\n.*1: duplicate values",
        ),
        ({}, [{}], r"changes\[0\]: fields and their values; found {}"),
        ({}, [{"name": "a"}, {"name": "a", "training.seed": 2}], "points 1, 2 have the name a"),
        ({}, [{"training.seed": 1}, {"training.seed": 1}], "points 1, 2 have the same recipe"),
        (
            {"training.seed": [1, 2], "checkpoints.name": ["kept"]},
            [],
            "points 1, 2 have the checkpoints.name kept, so that one would resume from the state of another",
        ),
        (
            {"training.seed": list(range(5)), "training.max_steps": list(range(1, 6))},
            [],
            "25 points, .*max_points: 25",
        ),
    ],
)
def test_mistakes_of_a_sweep_are_reported_before_anything_runs(grid, changes, message):
    with pytest.raises(RecipeError, match=message):
        drawn(grid, changes)


def test_all_mistakes_of_all_points_are_reported_together():
    with pytest.raises(RecipeError) as caught:
        drawn({"training.learning_rat": [1, 2], "training.max_steps": [-1, 2], "training.seed.x": [0]})
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "  training.learning_rat: unknown key; did you mean learning_rate?",
        "  training.max_steps: must be greater than 0; found -1 (points 1, 3)",
        "  training.seed: must be an integer; found {'x': 0}",
    ]


@pytest.mark.parametrize(
    ("concurrency", "ratio", "message"), [(2, 0, "above 0"), (2, 1.5, "1 at most"), (-1, 0.5, "0 for all")]
)
def test_invalid_settings_are_refused(concurrency, ratio, message):
    with pytest.raises(RecipeError, match=message):
        results.check(concurrency, ratio)


def test_points_that_cannot_run_count_as_failed(inputs):
    recipe = Recipe.model_validate(tiny_recipe(*inputs))
    points = drawn(
        changes=[{"training.seed": 1}, {"sharding": "device_map"}, {"training.seed": 2}], recipe=recipe
    )
    found = results.plan_points(points, 0.5 / 3, planner.make)
    assert [bool(point.refused) for point in found.points] == [False, True, False]
    assert "method full with sharding device_map" in found.points[1].refused
    assert results.least(points, 2 / 3) == 2
    with pytest.raises(
        RecipeError, match=r"2 of 3 points can run, 3 must succeed: 1 mistake\n  tiny-2: .*device_map"
    ):
        results.plan_points(points, 0.9, planner.make)


def test_the_lines_of_a_reason_are_one_sentence_each():
    reason = (
        "recipe a: 2 mistakes\n  training.seed: must be an integer\n  data.path: there is none.\n\n  last"
    )
    assert (
        results._line(reason)
        == "recipe a: 2 mistakes; training.seed: must be an integer; data.path: there is none. last"
    )


def compared(losses, field="training.seed", reach=0.1, **reasons):
    points = drawn({field: list(range(1, len(losses) + 1))})
    done = {
        one.recipe.name: Outcome(name=one.recipe.name, values=[number], scored=score(loss, reach))
        for number, (one, loss) in enumerate(zip(points.points, losses, strict=True), 1)
        if loss is not None
    }
    return results.compare(points, done, reasons)


def test_the_best_has_the_lowest_loss_and_points_within_its_interval_are_named():
    name = recipe_of().name
    found = compared([2.0, 1.5, None, 1.6, float("nan")])
    assert found.best == f"{name}-2"
    assert found.as_good == [f"{name}-4"]
    assert f"Within chance of it, by their 95 % intervals: {name}-4. 1 of 5 failed." in results.verdict(found)
    assert found.warnings[0].startswith(
        f"{name}-1, {name}-4: there are no scores of each sample to pair with the best point's"
    )
    assert compared([1.5, 1.5]).best == f"{name}-1"
    assert compared([1.5, 1.8], reach=0.01).as_good == []
    assert "No point has a figure to be compared by." in results.verdict(compared([None]))
    assert found.outcomes[2].reason.startswith("no reason is known")


def test_page_and_table_show_and_escape_every_point():
    points = drawn(changes=[{"description": "<b>1"}, {"training.learning_rate": 1e-3}])
    done = {
        points.points[1].recipe.name: Outcome(
            name=points.points[1].recipe.name, values=["", 1e-3], scored=score(2.0)
        )
    }
    found = results.compare(points, done, {points.points[0].recipe.name: "Out<i>OfMemory"})
    page = results.html(found)
    assert "<b>1" not in page
    assert "Out<i>" not in page
    assert page.count("<path") == 2
    assert page.count("stroke-dasharray") == 1
    assert not re.findall(r"(?:src|href)=", page)
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        results.show(found, console)
    text = console.export_text()
    assert f"{points.points[0].recipe.name} failed: Out<i>OfMemory" in text
    assert results.ranked(found)[0].name == found.best


def test_a_chart_of_many_values_and_of_one_run():
    assert results.html(compared([2 + number / 40 for number in range(20)])).count("<path") == 20
    assert results.html(compared([1.0])).count("<path") == 1
    assert results.html(compared([None])).count("failed") > 1


def run_of(name):
    """Return a run with the fields that its results need."""
    recipe = recipe_of(name=name)
    request = {"model": recipe.model, "data": recipe.data, "fingerprint": "1"}
    return Run(
        recipe=recipe,
        plan=plan_for(recipe),
        route="a",
        shape="a",
        request=request,
        base={"name_or_path": "b"},
        scratch_folder="k",
    )


def test_a_failed_point_leaves_its_reason_and_the_others_continue():
    first = Running(runs=[run_of(name) for name in ("p-1", "p-2", "p-3")], least=2, concurrency=2, notes="n")
    then = first.after({"p-1": {"trained": "x"}, "p-2": "train: it failed", "p-3": {"trained": "y"}})
    assert [(run.recipe.name, run.made.get("trained")) for run in then.runs] == [("p-1", "x"), ("p-3", "y")]
    assert (then.reasons, then.spare) == ({"p-2": "train: it failed"}, 0)
    assert then.stopped_if_too_few() is then
    last = then.after({"p-1": "it failed too", "p-3": {}}).stopped_if_too_few()
    assert last.runs == []
    assert last.reasons["p-3"] == "not run: 1 point is left, and 2 must succeed (min_success_ratio)"


@task
def halve(number: int) -> int:
    if number % 2:
        raise DataError(f"{number} is odd")
    return number // 2


def test_a_mapped_task_may_fail_for_each_point_and_for_all(tmp_path):
    notes = str(tmp_path / "notes" / "train" / "a")
    assert map_points(halve, notes, allowed_failures=3)(number=[2, 3, 4]) == [1, None, 2]
    assert [failure_reason(FLYTE, notes, index) for index in range(3)] == ["", "3 is odd", ""]
    assert map_points(halve, str(tmp_path / "all" / "a"), allowed_failures=2)(number=[1, 3]) == [None, None]


def test_points_are_refused_once_too_many_have_failed(tmp_path):
    notes = str(tmp_path / "notes" / "train" / "a")
    assert map_points(halve, notes, allowed_failures=1)(number=[1, 3, 4, 6]) == [None, None, None, None]
    assert failure_reason(FLYTE, notes, 1) == "3 is odd"
    assert failure_reason(FLYTE, notes, 2) == "not run: 2 points had failed, and 1 may (min_success_ratio)"


@pytest.mark.parametrize(("address", "ended"), [("gone", "error.pb"), ("there", "outputs.pb")])
def test_a_pod_runs_the_element_of_its_index_and_stores_its_reason(address, ended, tmp_path):
    history.record(str(tmp_path / "there"), decision("a"), expected=None)
    history.record(str(tmp_path / "there"), decision("b"), expected="a")
    made = map_points(rollback_accepted, str(tmp_path / "notes" / "all"), allowed_failures=2)
    write_inputs(
        made, tmp_path / "inputs.pb", {"accepted": ["x", str(tmp_path / address)], "reason": ["", "why"]}
    )
    command = fill_command(made.get_command(SETTINGS), str(tmp_path / "inputs.pb"), str(tmp_path))
    number = {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "NUMBER", "NUMBER": "1", "FLYTE_ATTEMPT_NUMBER": "0"}
    environment = os.environ | number | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    command[0] = str(Path(sys.executable).with_name(command[0]))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert (tmp_path / ended).exists(), done.stderr[-3000:]
    left = "" if address == "there" else f"{tmp_path}/gone: "
    assert failure_reason(FLYTE, str(tmp_path / "notes" / "all"), 1).startswith(left)
    assert bool(failure_reason(FLYTE, str(tmp_path / "notes" / "all"), 1)) is (address == "gone")


def run(folder, recipe, *arguments):
    """Run `pyflyte run` with its own home and temporary directory."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    (folder / "tmp").mkdir()
    environment = os.environ | {"HOME": str(folder), "TMPDIR": str(folder / "tmp")}
    command = [
        Path(sys.executable).with_name("pyflyte"),
        "run",
        "workflows/sweep.py",
        "sweep",
        "--recipe",
        path,
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)


def test_too_many_failures_end_the_sweep_with_the_reason(inputs, tmp_path):
    changes = [{"data.path": "none.jsonl"}, {"training.seed": 1}]
    done = run(tmp_path, tiny_recipe(*inputs), "--changes", json.dumps(changes), "--min_success_ratio", "1")
    assert done.returncode != 0
    assert "none.jsonl" in done.stderr
    assert "train_loss" not in done.stdout + done.stderr  # the second point was not started


@pytest.mark.slow
def test_points_with_a_precomputed_reference_are_trained_and_compared(inputs, tmp_path):
    """Two points share the reference, one reads another one's, and one computes it in each step."""
    rows = write_preferences(tmp_path / "rows.jsonl", 48)
    objective = {"objective": {"name": "dpo", "precompute_ref_log_probs": True}, "training.max_steps": 2}
    changes = [
        {"training.learning_rate": 1e-3},
        {"training.learning_rate": 2e-3},
        {"data.seed": 7},
        {"objective.precompute_ref_log_probs": False},
    ]
    done = run(
        tmp_path,
        tiny_recipe(inputs[0], rows, objective | {"method": "lora"}),
        "--changes",
        json.dumps(changes),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = Sweep.read(Path(done.stdout.strip().splitlines()[-1]) / "sweep.json")
    assert [outcome.reason for outcome in found.outcomes] == [""] * 4
    folders = {path.parent for path in (tmp_path / "tmp").rglob("reference.json")}
    assert len(folders) == 2, "one for each data set"


@pytest.mark.journey
def test_a_failed_point_does_not_fail_the_sweep_and_the_best_runs_again(inputs, changes, tmp_path):
    recipe = tiny_recipe(*inputs, {"training.max_steps": 2})
    done = run(tmp_path, recipe, "--changes", json.dumps(changes), "--min_success_ratio", "0.4")
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(done.stdout.strip().splitlines()[-1])
    found = Sweep.read(folder / "sweep.json")
    check_table(found, "pairs.jsonl")
    assert all(
        Path(outcome.artifact, "report.html").is_file()
        for outcome in found.outcomes
        if not outcome.has_failed
    )
    assert (folder / "report.html").read_text().count("<path") == 5
    assert "Best: tiny-1" in done.stderr
    assert len(list((tmp_path / "tmp").rglob("flytune-*/dataset/manifest.json"))) <= 1, (
        "the data was prepared once"
    )
    best = Recipe.from_yaml(folder / "best.yaml")
    assert best.name == "tiny-1"
    assert planner.make(best).shape == "cpu-1"
