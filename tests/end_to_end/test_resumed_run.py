"""Run that is killed and started again, from the recipe to the artifact: its report, identity and
reproduction."""

import re

import pytest

from flytune.artifacts import reproduction
from flytune.records import Contents, TrainingResult
from tests.support.faults import planted
from tests.support.pyflyte import pyflyte
from tests.support.reproduction import reproduce, results
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the artifacts of a run that was killed and started again, and of an equal one, and the second
    start's output."""
    folder = tmp_path_factory.mktemp("runs")
    inputs = tiny_base(folder), write_pairs(folder / "pairs.jsonl", 64)
    changes = {"method": "lora", "sharding": "ddp", "hardware.shape": "cpu-2", "evaluation.eval_steps": 2}
    changes |= {"training.max_steps": 6, "checkpoints.save_steps": 1}

    def run(name, expected=0, seen=None):
        kept = "calm" if name == "calm" else "disturbed"
        (folder / name).mkdir()
        own = {
            "checkpoints.folder": str(folder / kept / "kept"),
            "publish.address": str(folder / kept / "store"),
        }
        done = pyflyte(tiny_recipe(*inputs, changes | own), folder / name, seen)
        assert (done.returncode == 0) == (expected == 0), done.stderr[-3000:]
        return done.stdout + done.stderr

    run("calm")
    (folder / "disturbed").mkdir()
    run("killed", expected=1, seen=planted("kill 1 3"))
    said = run("resumed")
    return *(next((folder / kept / "store").iterdir()) for kept in ("disturbed", "calm")), said


def test_its_log_and_report_say_what_it_continues_and_why(runs):
    resumed, calm, said = runs
    training = TrainingResult.read(resumed / "training.json")
    first, last = training.attempts
    assert (first.resumed_from_step, last.last_step) == (0, 6)
    assert 0 < last.resumed_from_step <= first.last_step <= 3
    # The rank that was killed, not the lost peer that the first one has seen.
    assert first.ended.startswith("rank 1: out of host memory: ended by SIGKILL")
    assert not last.ended
    # A resumed run without Flyte numbers its attempts by their records.
    start = (
        rf"attempt 2: resumes at step {last.resumed_from_step} from \S+/disturbed/kept/tiny-\S+; attempt 1: "
    )
    assert re.search(start + re.escape(first.ended), said)
    page, card = ((resumed / name).read_text() for name in ("report.html", "README.md"))
    assert first.ended in page
    assert "it finished the run" in page
    assert f"1: {first.ended}" in card
    for name in ("report.html", "README.md"):
        assert "it finished the run" not in (calm / name).read_text()


def test_equal_runs_of_an_adapter_have_equal_identities(runs):
    resumed, calm, _ = runs
    identities = [Contents.read(artifact / "artifact.json").identity for artifact in (resumed, calm)]
    assert identities[0] == identities[1] != ""
    assert resumed.name == calm.name, "an artifact is published under its identity"


def test_reproduce_of_it_says_equal(runs, tmp_path):
    done = reproduce(runs[0], "--out", tmp_path / "again", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    found = reproduction.Reproduction.model_validate_json(done.stdout)
    assert set(results(found).values()) == {"equal"}
    compared = reproduce(runs[0], "--with", runs[1], "--json")
    assert compared.returncode == 0, compared.stderr[-3000:]
