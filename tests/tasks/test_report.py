"""Tests of the report of a failed run, with Flyte's messages on a cluster."""

import signal
import sys

import pytest
from flytekit.types.error.error import FlyteError

from flytune.artifacts import notify
from flytune.recipe import Recipe
from flytune.training import attempt as attempt_module
from flytune.training import earlier_attempts
from flytune.training.attempt import record_failure
from flytune.training.checkpoints import paths
from tasks.report import report_failure
from tasks.runtime import face
from tasks.runtime.orchestrator import Flyte
from tests.support.attempts import attempt, execution  # noqa: F401 (fixtures)
from tests.support.flyte_errors import CASES, OURS
from tests.support.pods import pod
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

OOM = CASES["OOMKilled"][0]


class OnCluster(Flyte):
    """A cluster without a storage that attempts share."""

    def is_local(self):
        return False

    def shared_address(self, name):
        return None


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["pyflyte-execute", "--", "task-module", "tasks.train", "task-name", "train_l4_1"]
    )
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "abc")
    monkeypatch.setenv(
        "FLYTE_EXECUTION_URL", "https://flyte/console/projects/p/domains/d/executions/abc/nodeId/fn0-0/nodes"
    )
    monkeypatch.setattr(face, "FLYTE", OnCluster())
    changes = {
        "checkpoints.folder": str(tmp_path / "checkpoints"),
        "checkpoints.save_steps": 2,
        "notify.webhook": True,
    }
    return Recipe.model_validate(
        tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64), changes)
    )


@pytest.fixture
def sent(monkeypatch):
    """List of texts that are sent to the webhook."""
    texts = []
    monkeypatch.setattr(notify, "send", lambda recipe, ended, text: texts.append(text))
    return texts


def test_the_message_has_the_task_s_own_sentence(recipe, sent, tmp_path, monkeypatch):
    phases = tmp_path / "phases"
    monkeypatch.setattr(
        OnCluster, "shared_address", lambda self, name: str(phases) if name == "phases" else None
    )
    secret = OURS._replace(details="Traceback\nurl = 'https://user:hunter2@host/x'")
    for text in (OURS._replace(sentence="another task's"), secret):
        record_failure(text, "bug", str(phases / "abc" / text.sentence[:5]))
        attempt_module._kept.clear()
    report_failure(
        recipe=recipe, err=FlyteError(f"[4/4] currentAttempt done. Last Error: USER::{OURS}", "fn0")
    )
    first, second, *others = sent[0].splitlines()
    assert first == "tiny: train_cpu_2 failed: rank 1: bug: KeyError: 'a'"
    assert second == "what to do: the traceback says where"
    assert others[:3] == ["final", "log: kubectl", "There is no complete checkpoint."]
    assert "https://[hidden]@host/x" in sent[0]
    assert not any("hunter2" in path.read_text() for path in phases.rglob("*.json"))


@pytest.mark.parametrize("case", CASES)
def test_no_message_begins_with_flytes_prefix_or_names_the_reporting_node(case, recipe, sent):
    report_failure(recipe=recipe, err=FlyteError(CASES[case][0] + "\n" + "x" * 9000, "fn0"))
    (text,) = sent
    assert text.startswith("tiny: ")
    assert "fn0" not in text.partition("nodeId")[0]
    assert len(text) <= notify.LONGEST
    assert "\nwhat to do: " in text
    assert "\nThere is no complete checkpoint." in text
    assert (
        "\n"
        "log: the console's page of execution abc https://flyte/console/projects/p/domains/d/executions/abc\n"
        in text
        + "\n"
    )


def test_a_killed_pod_is_named_by_its_last_note(recipe, sent, tmp_path):
    place = paths.ledger_of(recipe, paths.run_key(recipe, "0" * 64)).storage.address
    assert attempt(place, 0, phase="load") == -signal.SIGKILL
    assert attempt(place, 1, phase="export") == -signal.SIGKILL
    report_failure(recipe=recipe, err=FlyteError(OOM, "fn0"))
    first, _, third, *_ = sent[0].splitlines()
    assert first.startswith(
        "tiny: train_l4_1 failed: out of host memory: the kernel ended the pod's container primary (OOMKilled"
    )
    assert third.startswith("last seen: train_l4_1, attempt 2, export: ")
    assert third.endswith(" GiB of the pod's memory")


def test_a_node_is_named_if_it_is_not_the_reporting_one(recipe, sent):
    report_failure(recipe=recipe, err=FlyteError(OOM, "n3"))
    assert sent[0].startswith("tiny: node n3 failed: out of host memory")


def test_the_report_of_a_pod(recipe, tmp_path):
    out = pod(report_failure, tmp_path / "pod", recipe=recipe, err=FlyteError(OOM, "fn0"))
    assert out == {}
    deck = next((tmp_path / "pod").rglob("deck.html")).read_text()
    assert "tiny: the run failed: out of host memory: the kernel ended" in deck


def test_notes_of_another_execution_are_ignored(recipe, sent):
    place = paths.ledger_of(recipe, paths.run_key(recipe, "0" * 64)).storage.address
    attempt(place, 0, execution="before")
    report_failure(recipe=recipe, err=FlyteError(OOM, "fn0"))
    assert "last seen" not in sent[0]
    assert earlier_attempts.read(place, "before")
