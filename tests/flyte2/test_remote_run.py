"""A run of Flyte 2 from the command to the fetched artifact, with a stand-in of the backend and the commands
of pods."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from flytune.records import TrainingResult
from tests.support.flyte2_actions import PREFIX, SUCCEEDED
from tests.support.flyte2_plane import configured, plane2
from tests.support.paths import ROOT
from tests.support.tiny import cluster_recipe, tiny_base, write_pairs


def killed_after_a_save(plane):
    """Kill the first training pod once it has stored a complete checkpoint; return the list of the killed."""
    killed = []

    def strike():
        while not killed:
            time.sleep(0.2)
            saved = [
                key for key in plane.below(f"{PREFIX}/flytune-checkpoints/") if key.endswith("/manifest.json")
            ]
            running = [
                action
                for action in plane.executor.actions.values()
                if action.task.endswith(".train") and action.pod
            ]
            if saved and running:
                running[0].pod.kill()
                killed.append(saved)

    threading.Thread(target=strike, daemon=True).start()
    return killed


@pytest.mark.slow
def test_a_run_goes_from_the_command_through_a_killed_pod_to_an_artifact_that_is_fetched(tmp_path):
    base, rows = tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64)
    changes = {"training.max_steps": 40, "checkpoints.save_steps": 2}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(cluster_recipe(base, rows, changes)))

    def flytune(*arguments):
        program = Path(sys.executable).with_name("flytune")
        done = subprocess.run(
            [program, *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    with plane2(tmp_path) as plane:
        settings = {"HOME": str(tmp_path), "FLYTECTL_CONFIG": str(configured(plane, tmp_path))}
        environment = os.environ | plane.storage | settings
        killed = killed_after_a_save(plane)
        said = flytune("run", tmp_path / "recipe.yaml", "--flyte2", "--remote", "--name", "first")
        assert "Created Run: first" in said
        # The log's stream ends long before the run.
        assert "train: succeeded" in said
        assert "run first: succeeded" in said
        actions = plane.executor.of_run("first")
        first, second = (action for action in actions if action.task.endswith(".train"))
        assert {action.phase for action in actions if action is not first} == {SUCCEEDED}, [
            action.error for action in actions
        ]
        assert killed
        # An action that the driver starts for the stage of a killed one is the next attempt of the run.
        assert (first.attempt, first.error.code, second.attempt) == (1, "OOMKilled", 1)
        reason = (
            r"attempt 1: killed without a report: (first step|steady step|save), \d+\.\d of \d+\.\d "
            r"GiB of the pod's memory"
        )
        assert re.search(
            rf"attempt 2.*: resumes at step \d+ from \S+; {reason}, node ", second.logs[-1].read_text()
        )
        # No stage looks below an address of its own action for what runs share.
        shared = [key for key in plane.below("") if "/flytune-" in key]
        assert all(key.startswith(f"{PREFIX}/flytune-") for key in shared)

        flytune("fetch", "first", tmp_path / "out")
        training = TrainingResult.read(tmp_path / "out" / "training.json")
        lost, last = training.attempts
        assert re.match(reason.partition(": ")[2], lost.ended)
        assert (lost.number, lost.retry, last.number, last.retry, last.ended) == (1, 0, 2, 1, "")
        assert (tmp_path / "out" / "model.safetensors").is_file()
