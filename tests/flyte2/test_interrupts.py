"""Ctrl-C and SIGTERM in a local run of `flytune run --flyte2`: saved, said, and no process left."""

import os
import re
import signal

import pytest

from tests.support import interrupted
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs
from tests.support.waiting import until

SAVED = r"^tiny: {}: step (\d+) is saved; the same command resumes from it \((\S+)\)$"


def recipe(folder, **changes):
    own = {
        "checkpoints.folder": str(folder / "kept"),
        "checkpoints.save_steps": 4,
        "training.max_steps": 20_000,
    }
    return tiny_recipe(tiny_base(folder), write_pairs(folder / "pairs.jsonl", 60), own | changes)


@pytest.mark.journey
@pytest.mark.parametrize(
    ("number", "send", "name"),
    [(signal.SIGINT, os.killpg, "Ctrl-C"), (signal.SIGTERM, os.kill, "SIGTERM")],
    ids=["Ctrl-C of a terminal", "SIGTERM to the command alone"],
)
def test_a_local_run_saves_its_step_says_how_to_go_on_and_leaves_no_process(number, send, name, tmp_path):
    groups = []

    def signals(process):
        groups.append(process.pid)
        send(process.pid, number)

    code, said = interrupted.signalled(recipe(tmp_path), tmp_path, "^step 2/", signals, ["--flyte2"])
    assert code == 128 + number
    assert "Traceback" not in said
    assert "Aborted" not in said
    assert [line for line in said.splitlines() if line][-1].startswith(f"tiny: {name}: step ")
    step, address = re.search(SAVED.format(name), said, re.MULTILINE).groups()
    assert int(step) >= 2
    assert [found for found in os.listdir(address) if found.startswith(f"{step}-")]
    until(lambda: interrupted.has_ended(groups[0]))
