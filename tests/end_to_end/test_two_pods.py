"""Tests of two-node runs in two pods, with the training operator's variables and shared storage, but no
shared disk."""

import json
import re
import warnings

import msgpack
import pytest

from flytune.recipe import Recipe
from flytune.records import TrainingResult
from flytune.selftest import Matrix
from tests.support import fork_server, ranks
from tests.support.execution import Run
from tests.support.flyteadmin import flyteadmin
from tests.support.laptop import WHERE, checkout, pyflyte, submit
from tests.support.propeller import PodFailed
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.journey
@pytest.mark.parametrize("sharding", ["zero2", "fsdp"])
def test_two_pods_are_one_run(sharding, tmp_path):
    inputs = fork_server.call(tiny_base, tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64)
    changes = {"sharding": sharding, "checkpoints": {"save_steps": 2}}
    with flyteadmin(tmp_path / "home") as (admin, storage):
        recipe = tiny_recipe(*inputs, changes | {"hardware.shape": "cpu-1x2"})
        name = submit(checkout(tmp_path / "laptop"), tmp_path / "home", admin, recipe)
        run = Run(admin, name, tmp_path / "run", storage)
        prepared = run.until("prepare_data")["o0"].scalar.blob.uri
        # The upload ends when the pod without rank 0 is seen to wait for it.
        admin.uploads_end.clear()
        run.options["train_cpu_1x2"] = {"strike": lambda pods: admin.looks < 2 or admin.uploads_end.set()}
        trained = run.until("train")["o0"].scalar.blob.uri
        dataset, two = admin.fetch(prepared, tmp_path / "dataset"), admin.fetch(trained, tmp_path / "two")
        checkpoints = admin.keys("flytune-checkpoints/")
        exports = [key for key in admin.keys("ab/") if key.endswith("model.safetensors")]
    assert sorted(run.pods("train_cpu_1x2")) == [0, 1]
    assert TrainingResult.read(two / "training.json").world_size == 2
    # Of each attempt, one pod exports; a failed attempt is retried, as on a cluster.
    attempts = [key.split("/")[1] for key in exports]
    assert attempts
    assert len(set(attempts)) == len(attempts)
    assert {key.split("/")[2].split("-")[0] for key in checkpoints} >= {"2", "3"}
    alone = Recipe.model_validate(tiny_recipe(*inputs, {"sharding": sharding, "hardware.shape": "cpu-2"}))
    fork_server.call(ranks.run, 2, ranks.fit, alone, dataset, tmp_path / "one")
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


@pytest.mark.slow
def test_each_retry_survives_a_preemption_of_one_of_two_nodes_and_the_last_failure_names_all(tmp_path):
    laptop = checkout(tmp_path / "laptop")
    shapes = (laptop / "shapes.yaml").read_text()
    (laptop / "shapes.yaml").write_text(shapes.replace("name: cpu-1x2\n", "name: cpu-1x2\n  retries: 1\n"))
    changes = {
        "sharding": "ddp",
        "hardware.shape": "cpu-1x2",
        "checkpoints": {"save_steps": 10**5},
        "training.max_steps": 10**5,
    }

    def drain(pods):
        if re.search(r"step \d+/100000 ", pods[0].log_text()):
            pods[1].drain()

    with flyteadmin(tmp_path / "home") as (admin, storage):
        recipe = tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64), changes)
        run = Run(admin, submit(laptop, tmp_path / "home", admin, recipe), tmp_path / "run", storage)
        run.options["train_cpu_1x2"] = {"strike": drain, "strikes": 99, "cold": True}
        with pytest.raises(PodFailed) as failed, warnings.catch_warnings(record=True):
            run.outputs()
    first, second = (tmp_path / "run" / name / "0" / "log" for name in ("train_cpu_1x2", "train_cpu_1x2-1"))
    report = (tmp_path / "run" / "report_failure" / "0" / "log").read_text()
    assert not (tmp_path / "run" / "train_cpu_1x2-2").exists(), "one retry is one more attempt"
    assert "resumes" not in first.read_text().partition("trained ")[0]
    ended = r"preempted: SIGTERM: step (\d+) is saved, [\d.]+ s of 30 were left for it, node n1"
    start = re.search(
        rf"attempt 2 of 2: resumes at step (\d+) from (s3://\S+); attempt 1: {ended}\n", second.read_text()
    )
    assert start
    assert start[1] == start[3]
    assert f"flytune-checkpoints/{recipe['name']}" in start[2]
    # A job has a message of its own if its first pod ends before the operator sees that the other one is
    # lost.
    if "PyTorchJobFailed" in str(failed.value):
        match = re.search(
            rf"train_cpu_1x2 failed: .*1 Worker.*\n(?:.*\n)?attempt 1: {ended}\nattempt 2: {ended}\n", report
        )
    else:
        saved = r"preempted: SIGTERM: step (?=(?:.*\n)*.*attempt 1: .*step (\d+))(\d+) is saved"
        match = re.search(rf"train_cpu_1x2 failed: .*{saved}(?:.*\n)*.*none is left\nattempt 1: ", report)
    assert match, report
    assert int(match[1]) == int(start[1]) < int(match[2])
    assert f"Newest complete checkpoint: step {match[2]}, " in report
    # The message of a pod that reaches the console names them too.
    assert re.search(rf"attempt 2 of 2; none is left\\nattempt 1: {ended}", second.read_text())


@pytest.mark.slow
def test_two_pods_fill_one_matrix_of_the_selftest(tmp_path):
    with flyteadmin(tmp_path / "home") as (admin, storage):
        what = [
            "workflows/selftest.py",
            "selftest",
            "--shape",
            "cpu-1x2",
            "--pairs",
            "full/ddp,lora/fsdp,full/none,full/fsdp/2x2",
        ]
        laptop = checkout(tmp_path / "laptop")
        done = pyflyte(laptop, tmp_path / "home", "run", "--remote", "--copy", "all", *WHERE, *what)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        run = Run(admin, next(iter(admin.executions)), tmp_path / "run", storage)
        found = run.until("selftest")["o0"].scalar.binary.value
    assert sorted(run.pods("selftest_cpu_1x2")) == [0, 1]
    matrix = Matrix.model_validate(msgpack.unpackb(found))
    assert matrix.machine.startswith("2 nodes of 1 rank on a CPU")
    assert [(cell.sharding, cell.state) for cell in matrix.cells] == [
        ("ddp", "equal"),
        ("fsdp", "equal"),
        ("none", "equal"),
        ("fsdp", "equal"),
    ]
    assert {distance.layout[-2:] for cell in matrix.cells[:2] for distance in cell.distances} == {"x2"}
    assert {distance.layout[-2:] for distance in matrix.cells[3].distances} == {"x4"}
