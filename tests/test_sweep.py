"""Sweeps: points from a recipe, their comparison, and the workflow as users run it."""

import json
import math
import os
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import yaml
from flytekit import FlyteContextManager
from flytekit.core.context_manager import ExecutionState
from flytekit.tools.translator import get_serializable
from rich.console import Console

from flytune import grids, planner, sweeps
from flytune.errors import RecipeError
from flytune.metrics import Score
from flytune.recipe import Recipe
from flytune.sweeps import Outcome, Sweep
from tests.test_planner import recipe_of
from tests.test_tasks import SETTINGS
from tests.tiny import tiny_base, tiny_recipe, write_pairs
from workflows.sweep import run_points, sweep

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_base(folder), write_pairs(folder / "pairs.jsonl", 64)


def drawn(grid=None, changes=(), recipe=None, most=24):
    return grids.draw(recipe or recipe_of(), grid or {}, list(changes), most)


def test_a_grid_is_all_combinations_each_a_recipe_with_a_name_of_its_own():
    points = drawn({"training.learning_rate": [1e-4, "2e-4"], "training.seed": [1, 2.0, 3]}).points
    assert [(one.recipe.training.learning_rate, one.recipe.training.seed) for one in points] == [
        (rate, seed) for rate in (1e-4, 2e-4) for seed in (1, 2, 3)
    ]
    base = recipe_of()
    assert [one.recipe.name for one in points] == [f"{base.name}-{number}" for number in range(1, 7)]
    for one in points:
        assert one.recipe.model_copy(update={"name": base.name, "training": base.training}) == base


def test_sections_may_be_names_or_have_fields_and_long_names_and_checkpoints_stay_apart():
    recipe = recipe_of(name="a" * 63, checkpoints={"name": "kept"})
    first, second = drawn(changes=[{"method": "lora", "method.r": 8}, {"method": {"name": "full"}}], recipe=recipe).points
    assert (first.recipe.method.name, first.recipe.method.r, second.recipe.method.name) == ("lora", 8, "full")
    assert first.recipe.name == "a" * 61 + "-1"
    assert [one.recipe.checkpoints.name for one in (first, second)] == ["kept-1", "kept-2"]
    assert grids.value_at(second.recipe, "method") == "full"
    assert grids.value_at(first.recipe, "method") == {"name": "lora", "r": 8}
    assert grids.value_at(first.recipe, "checkpoints.folder.x") is None


@pytest.mark.parametrize(
    ("grid", "changes", "told"),
    [
        ({}, [], "give a grid .* or a list of changes .*; none is given"),
        ({"training.seed": [1]}, [{"training.seed": 1}], "both are given"),
        (
            {"training.seed": 3, "training.max_steps": [1, 1]},
            [],
            r"training.seed: a grid has a list .*; found 3\n.*1 stands twice",
        ),
        ({}, [{}], r"changes\[0\]: fields and their values; found {}"),
        ({}, [{"name": "a"}, {"name": "a", "training.seed": 2}], "points 1, 2 have the name a"),
        ({}, [{"training.seed": 1}, {"training.seed": 1}], "points 1, 2 have the same recipe"),
        ({"training.seed": list(range(5)), "training.max_steps": list(range(1, 6))}, [], "25 points, .*max_points: 25"),
    ],
)
def test_mistakes_of_a_sweep_are_told_before_anything_runs(grid, changes, told):
    with pytest.raises(RecipeError, match=told):
        drawn(grid, changes)


def test_all_mistakes_of_all_points_are_told_at_once():
    with pytest.raises(RecipeError) as caught:
        drawn({"training.learning_rat": [1, 2], "training.max_steps": [-1, 2], "training.seed.x": [0]})
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "  training.learning_rat: unknown key; did you mean learning_rate?",
        "  training.max_steps: input should be greater than 0; found -1 (points 1, 3)",
        "  training.seed: input should be a valid integer; found {'x': 0}",
    ]


@pytest.mark.parametrize(("concurrency", "ratio", "told"), [(2, 0, "above 0"), (2, 1.5, "1 at most"), (-1, 0.5, "0 for all")])
def test_settings_that_mean_nothing_are_refused(concurrency, ratio, told):
    with pytest.raises(RecipeError, match=told):
        sweeps.check(concurrency, ratio)


def test_points_that_cannot_run_count_as_failed(inputs):
    recipe = Recipe.model_validate(tiny_recipe(*inputs))
    points = drawn(changes=[{"training.seed": 1}, {"sharding": "device_map"}, {"training.seed": 2}], recipe=recipe)
    found = sweeps.planned(points, 0.5 / 3)
    assert [bool(one.refused) for one in found.points] == [False, True, False]
    assert "method full with sharding device_map" in found.points[1].refused
    assert sweeps.least(points, 2 / 3) == 2
    with pytest.raises(RecipeError, match=r"2 of 3 points can run, 3 must succeed: 1 mistake\n  tiny-2: .*device_map"):
        sweeps.planned(points, 0.9)


def score(loss, reach=0.1):
    values = {"loss": loss, "loss_low": loss - reach, "loss_high": loss + reach}
    return Score(**values, **{name.replace("loss", "perplexity"): math.exp(value) for name, value in values.items()})


def compared(losses, field="training.seed", reach=0.1, **reasons):
    points = drawn({field: list(range(1, len(losses) + 1))})
    done = {
        one.recipe.name: Outcome(name=one.recipe.name, values=[number], tuned=score(loss, reach))
        for number, (one, loss) in enumerate(zip(points.points, losses, strict=True), 1)
        if loss is not None
    }
    return sweeps.compare(points, done, reasons)


def test_the_best_has_the_lowest_loss_and_those_within_chance_are_named():
    name = recipe_of().name
    found = compared([2.0, 1.5, None, 1.6, float("nan")])
    assert found.best == f"{name}-2"
    assert found.as_good == [f"{name}-4"]
    assert f"Within chance of it, by their 95 % intervals: {name}-4. 1 of 5 failed." in sweeps.verdict(found)
    assert compared([1.5, 1.5]).best == f"{name}-1"
    assert compared([1.5, 1.8], reach=0.01).as_good == []
    assert "No point has a held-out loss" in sweeps.verdict(compared([None]))
    assert found.outcomes[2].reason.startswith("no reason was told")


def test_losses_on_other_samples_are_warned_of():
    assert compared([1.0, 2.0]).warnings == []
    (warning,) = compared([1.0, 2.0], field="data.max_length").warnings
    assert warning.startswith("data.max_length: what is scored may differ")


def test_page_and_table_show_every_point_and_escape_what_they_show():
    points = drawn(changes=[{"description": "<b>1"}, {"training.learning_rate": 1e-3}])
    done = {points.points[1].recipe.name: Outcome(name=points.points[1].recipe.name, values=["", 1e-3], tuned=score(2.0))}
    found = sweeps.compare(points, done, {points.points[0].recipe.name: "Out<i>OfMemory"})
    page = sweeps.html(found)
    assert "<b>1" not in page
    assert "Out<i>" not in page
    assert page.count("<path") == 2
    assert page.count("stroke-dasharray") == 1
    assert not re.findall(r"(?:src|href)=", page)
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        sweeps.show(found, console)
    text = console.export_text()
    assert f"{points.points[0].recipe.name} failed: Out<i>OfMemory" in text
    assert sweeps.ranked(found)[0].name == found.best


def test_a_picture_of_many_values_and_of_one_run():
    assert sweeps.html(compared([2 + number / 40 for number in range(20)])).count("<path") == 20
    assert sweeps.html(compared([1.0])).count("<path") == 1
    assert sweeps.html(compared([None])).count("failed") > 1


def test_the_points_are_mapped_over_a_launch_plan_with_the_inputs_limits():
    recipes = [recipe_of(name=f"p-{number}") for number in range(3)]
    context = FlyteContextManager.current_context().with_serialization_settings(SETTINGS)
    state = context.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    with FlyteContextManager.with_context(context.with_execution_state(state)) as inner:
        made = run_points.compile_into_workflow(
            inner, run_points.task_function, recipes=recipes, notes="s3://b/n", concurrency=3, successes=2
        ).to_flyte_idl()
    (array,) = [node.array_node for node in made.nodes if node.HasField("array_node")]
    assert (array.parallelism, array.min_successes) == (3, 2)
    assert array.node.workflow_node.launchplan_ref.name == "sweep_point"


def test_registering_the_sweep_registers_what_it_maps_over():
    entities = OrderedDict()
    get_serializable(entities, SETTINGS, sweep)
    names = {entity.name for entity in entities if hasattr(entity, "name")}
    assert {"sweep_point", "workflows.sweep.sweep_point", "workflows.finetune.finetune", "tasks.sweep.note_failure"} <= names
    (point,) = [spec for entity, spec in entities.items() if getattr(entity, "name", "") == "workflows.sweep.sweep_point"]
    assert point.template.failure_node is not None


def run(folder, recipe, *arguments):
    """`pyflyte run` in a home and a temporary directory of its own."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    (folder / "tmp").mkdir()
    environment = os.environ | {"HOME": str(folder), "TMPDIR": str(folder / "tmp")}
    command = [Path(sys.executable).with_name("pyflyte"), "run", "workflows/sweep.py", "sweep", "--recipe", path, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)


def test_too_many_failures_end_the_sweep_with_the_reason(inputs, tmp_path):
    changes = [{"data.path": "none.jsonl"}, {"training.seed": 1}]
    done = run(tmp_path, tiny_recipe(*inputs), "--changes", json.dumps(changes), "--min_success_ratio", "1")
    assert done.returncode != 0
    assert "none.jsonl" in done.stdout
    assert "train_loss" not in done.stdout + done.stderr  # the second point was not begun


@pytest.mark.slow
def test_a_failed_point_does_not_fail_the_sweep_and_the_best_runs_again(inputs, tmp_path):
    recipe = tiny_recipe(*inputs, {"training.max_steps": 2})
    changes = [
        {"training.learning_rate": 1e-2},
        {"training.learning_rate": 1e39},  # infinite in float32: what it leaves is not finite, and the gate refuses it
        {"sharding": "device_map"},
        {"training.learning_rate": 1e-9},
    ]
    done = run(tmp_path, recipe, "--changes", json.dumps(changes))
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(done.stdout.strip().splitlines()[-1])
    found = Sweep.read(folder / "sweep.json")
    assert found.best == "tiny-1"
    assert [bool(one.tuned) for one in found.outcomes] == [True, False, False, True]
    assert "method full with sharding device_map" in found.outcomes[2].reason
    assert "not finite" in found.outcomes[1].reason
    assert "Error encountered" not in found.outcomes[1].reason
    assert all(Path(one.artifact, "report.html").is_file() for one in found.outcomes if one.tuned)
    assert (folder / "report.html").read_text().count("<path") == 4
    assert "Best: tiny-1" in done.stderr
    # The data was prepared once, and Flyte's cache gave it to the others.
    assert len(list((tmp_path / "tmp").rglob("flytune-*/dataset/manifest.json"))) <= 1
    best = Recipe.from_yaml(folder / "best.yaml")
    assert best.name == "tiny-1"
    assert planner.make(best).shape == "cpu-1"
