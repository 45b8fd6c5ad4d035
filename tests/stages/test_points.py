"""Tests of a sweep's elements, and of the results by which points go to the next stage."""

import pytest

from flytune.evaluation.task_kind import Job
from flytune.models import BaseRequest
from flytune.recipe import DataRequest
from flytune.stages import points
from flytune.stages.local import ThisMachine
from flytune.stages.orchestrator import Folder
from flytune.stages.planned import Run, Running
from flytune.stages.table import BASE_MODEL, HARNESS, PREPARE, RUN, TRAIN, Phase, Stage
from tests.support.plans import recipe_of
from tests.support.stages import plan_for


@pytest.fixture
def orchestrator(tmp_path):
    return ThisMachine(tmp_path)


def running(tmp_path, *fingerprints, **fields):
    runs = []
    for number, fingerprint in enumerate(fingerprints, 1):
        recipe = recipe_of(name=f"p-{number}")
        request = DataRequest(model=recipe.model, data=recipe.data, fingerprint=fingerprint)
        own = {
            "recipe": recipe,
            "plan": plan_for(recipe),
            "route": "cpu-1",
            "shape": "cpu-1",
            "request": request,
        }
        own |= {"base": BaseRequest(name_or_path="b"), "scratch_folder": f"k-{number}"}
        runs.append(Run(**own | fields))
    return Running(runs=runs, least=1, concurrency=2, notes=str(tmp_path / "notes"))


def test_points_with_equal_requests_share_an_element_whatever_is_ignored(tmp_path):
    state = running(tmp_path, "a", "b", "a")
    (found,) = points.elements(PREPARE, state.runs).values()
    assert [(one.inputs["scratch_folder"], one.runs) for one in found] == [
        ("k-1", ["p-1", "p-3"]),
        ("k-2", ["p-2"]),
    ]
    (base,) = points.elements(BASE_MODEL, state.runs)[points.ALL]
    assert base.runs == ["p-1", "p-2", "p-3"]


def test_a_stage_that_is_not_cached_has_an_element_for_each_point_by_its_task(tmp_path):
    made = {"dataset": "d", "base_files": "m", "export_only": False, "reference_folders": []}
    runs = running(tmp_path, "a", "a", "a", made=made).runs
    runs[1] = runs[1].model_copy(update={"route": "cpu-2"})
    found = points.elements(TRAIN, runs)
    assert {route: [element.runs for element in elements] for route, elements in found.items()} == {
        "cpu-1": [["p-1"], ["p-3"]],
        "cpu-2": [["p-2"]],
    }


def test_a_stage_over_a_list_has_an_element_for_each_item_and_none_for_none(tmp_path):
    jobs = [Job(task={"name": "t"}, shard=shard, shards=2) for shard in range(2)]
    made = {"base_files": "m", "trained": "t", "harness_data": "h"}
    runs = running(tmp_path, "a", "a", made=made).runs
    assert points.elements(HARNESS, runs) == {}
    runs[1] = runs[1].model_copy(update={"jobs": jobs})
    assert [element.inputs["job"] for element in points.elements(HARNESS, runs)["cpu-1"]] == jobs


def test_a_result_goes_to_all_points_that_share_it_and_a_reason_too(orchestrator, tmp_path):
    state = running(tmp_path, "a", "b", "a")
    (tmp_path / "notes" / "prepare").mkdir(parents=True)
    (tmp_path / "notes" / "prepare" / "all-1.txt").write_text("no JSON")
    results = {"dataset": [[Folder.here(tmp_path), None]], "base_files": [[Folder("s3://b/m", tmp_path)]]}
    then = points.after(orchestrator, state, [BASE_MODEL, PREPARE], results)
    assert [run.made for run in then.runs] == [{"base_files": "s3://b/m", "dataset": str(tmp_path)}] * 2
    assert then.reasons == {"p-2": "prepare: no JSON"}


def test_an_element_without_a_reason_is_named_by_its_pod(orchestrator, tmp_path):
    then = points.after(orchestrator, running(tmp_path, "a"), [PREPARE], {"dataset": [[None]]})
    assert then.reasons == {"p-1": "prepare: its pod ended without a reason; see the console"}


def test_results_of_a_list_keep_its_order_and_one_lost_item_costs_the_point(orchestrator, tmp_path):
    jobs = [Job(task={"name": "t"}, shard=shard, shards=2) for shard in range(2)]
    made = {"base_files": "m", "trained": "t", "harness_data": "h"}
    state = running(tmp_path, "a", "a", made=made, jobs=jobs)
    files = [Folder(f"s3://b/{number}", tmp_path) for number in range(3)]
    then = points.after(orchestrator, state, [HARNESS], {"answers": [[*files, None]]})
    assert [run.made["answers"] for run in then.runs] == [["s3://b/0", "s3://b/1"]]
    assert list(then.reasons) == ["p-2"]


def test_a_stage_waits_for_those_of_its_phase_whose_result_it_takes():
    first, second = Stage("a", "", makes="x"), Stage("b", "", makes="y", inputs={"i": "x"})
    third, free = Stage("c", "", makes="z", inputs={"i": "y", "j": "x"}), Stage("d", "", makes="w")
    assert Phase("p", (first, second, third, free)).waves == [[first, free], [second], [third]]
    assert [len(phase.waves) for phase in RUN if phase.name == "train"] == [2]
