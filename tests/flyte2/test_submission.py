"""Submissions by the SDK's own client to a stand-in of its control plane, which starts no pods here."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import flyte
import pytest
import yaml
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from flyteidl2.task.common_pb2 import Inputs

from flyte2.runtime.orchestrator import Flyte2
from flyte2.stages import TASKS
from flytune.errors import RecipeError, StorageError
from flytune.recipe import read_recipe
from tests.support.flyte2_actions import ETCD, QUEUED
from tests.support.flyte2_plane import configured, plane2
from tests.support.paths import ROOT
from tests.support.tiny import cluster_recipe, tiny_base, write_pairs
from tests.support.waiting import until


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder with a model and data."""
    folder = tmp_path_factory.mktemp("place")
    write_pairs(folder / "pairs.jsonl", 16)
    tiny_base(folder)
    return folder


@pytest.fixture(scope="module")
def plane(place):
    with plane2(place) as found:
        found.executor.runs_pods = False
        yield found


@pytest.fixture
def manners(plane):
    """Bad manners of the control plane, which end with the test."""
    yield plane.manners
    plane.manners.clear()
    plane.token = ""


def command(plane, place, *arguments, program="flyte", **admin):
    """Run a command with the SDK's configuration for the plane; return the finished process."""
    settings = {
        "HOME": str(place),
        "FLYTECTL_CONFIG": str(configured(plane, place, **admin)),
        "FLYTE_DISABLE_TELEMETRY": "1",
    }
    return subprocess.run(
        [str(Path(sys.executable).with_name(program)), *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=600,
    )


def inputs_of(plane, run):
    """Return the literals of a run's inputs by their names."""
    string = Inputs.FromString(plane.stored(f"{plane.runs[run].offloaded_input_data.uri}/inputs.pb"))
    return {literal.name: literal.value for literal in string.literals}


def unpacked(literal):
    import msgpack

    return msgpack.unpackb(literal.scalar.binary.value)


def written(place, **changes):
    content = cluster_recipe(place / "tiny", place / "pairs.jsonl", changes)
    (place / "recipe.yaml").write_text(yaml.safe_dump(content))
    return place / "recipe.yaml"


def test_a_run_is_submitted_with_addresses_of_its_files_and_with_the_code(plane, place):
    (place / "other.jsonl").write_text((place / "pairs.jsonl").read_text())
    sweep = [
        "run",
        "--copy-style",
        "all",
        "--name",
        "points",
        "flyte2/sweep.py",
        "sweep",
        "--recipe",
        written(place),
    ]
    done = command(plane, place, *sweep, "--changes", json.dumps([{"data.path": str(place / "other.jsonl")}]))
    assert "Created Run: points" in done.stdout, done.stderr[-2000:]
    inputs = inputs_of(plane, "points")
    recipe, change = unpacked(inputs["recipe"]), unpacked(inputs["changes"].collection.literals[0])
    for address, name in ((recipe["model"]["name_or_path"], "/config.json"), (recipe["data"]["path"], "")):
        assert (
            plane.stored(f"{address}{name}") == (place / f"{address.rpartition('/')[2]}{name}").read_bytes()
        )
    assert plane.stored(change["data.path"]) == (place / "other.jsonl").read_bytes()
    spec = plane.runs["points"].task_spec
    assert spec.task_template.id.name == "flytune.sweep"
    assert spec.ByteSize() < ETCD / 50
    assert any(address.endswith(".tar.gz") for address in plane.uploads)


@pytest.fixture
def connected(plane, place):
    """The SDK of this process, with the plane as its control plane."""
    from flyte import _initialize

    flyte.init_from_config(configured(plane, place), root_dir=ROOT)
    yield flyte.with_runcontext(mode="remote", copy_style="none", version="v1")
    _initialize._init_config = None


def test_a_second_run_sends_no_file_again(connected, plane, place):
    from flyte2.finetune import finetune

    recipe = read_recipe(written(place))
    connected.run(finetune, recipe=recipe)
    sent = len(plane.uploads)
    connected.run(finetune, recipe=recipe)
    assert len(plane.uploads) == sent


def test_what_cannot_be_uploaded_is_refused_in_words(connected, plane, place, manners):
    from flyte2.finetune import finetune

    with pytest.raises(RecipeError, match="data.path: none.jsonl: no such file"):
        connected.run(finetune, recipe=read_recipe(written(place, **{"data.path": "none.jsonl"})))
    manners["CreateUploadLocation"] = ConnectError(Code.PERMISSION_DENIED, "not yours")
    with pytest.raises(
        StorageError, match="not uploaded: the control plane answers PERMISSION_DENIED: not yours .project"
    ):
        connected.run(finetune, recipe=read_recipe(written(place)))


def test_every_task_and_trigger_is_deployed_by_the_sdk_far_below_the_limit_of_etcd(connected, plane, place):
    from flyte2 import schedules
    from flyte2.driver import driver

    flyte.deploy(driver, version="v2", copy_style="none")
    names = {name for name, version in plane.tasks if version == "v2"}
    assert {task.name for task in TASKS.values()} | {schedules.scheduled_refresh.name} <= names
    assert max(spec.ByteSize() for spec in plane.tasks.values()) < ETCD / 50
    assert {name: trigger.spec.active for name, trigger in plane.triggers.items()} == {
        "nightly": False,
        "weekly": False,
    }


def test_a_trigger_starts_a_run_with_all_inputs_whose_kickoff_is_its_start(connected, plane, monkeypatch):
    from flyte2 import schedules
    from flyte2.driver import driver

    flyte.deploy(driver, version="v3", copy_style="none")
    run = plane.fire("nightly", datetime(2026, 11, 21, 2, tzinfo=UTC))
    assert inputs_of(plane, run).keys() == {"recipe", "accepted", "days"}
    monkeypatch.setattr(schedules, "current", lambda: Flyte2("s3://raw", run=run))
    assert asyncio.run(schedules._start()) == plane.executor.of_run(run)[0].started


@pytest.mark.journey
def test_ctrl_c_leaves_the_submitted_run_alone_and_says_how_to_look_at_it(plane, place):
    settings = {
        "HOME": str(place),
        "FLYTECTL_CONFIG": str(configured(plane, place)),
        "FLYTE_DISABLE_TELEMETRY": "1",
    }
    command = ["run", str(written(place)), "--flyte2", "--remote", "--name", "left"]
    with subprocess.Popen(
        [str(Path(sys.executable).with_name("flytune")), *command],
        cwd=ROOT,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        until(lambda: plane.executor.of_run("left"))
        os.killpg(process.pid, signal.SIGINT)
        said = process.stdout.read()
    assert process.returncode == 130, said
    assert "run left goes on: `flyte get action left` shows it, `flyte abort run left` ends it" in said
    assert [action.phase for action in plane.executor.of_run("left")] == [QUEUED]
