"""Tests of how jobs end, with stand-ins for the kubelet, the training operator and Flyte
(tests/support/kubelet.py)."""

import itertools
import os
import signal
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
from flytekit.bin.entrypoint import setup_execution
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.tools.translator import get_serializable

from flytune.errors import StorageError
from flytune.failures import reports
from flytune.stages import job_end
from tasks.runtime import termination
from tests.chaos.pods import SETTINGS
from tests.support import kubelet, propeller
from tests.support.flyteadmin import flyteadmin
from tests.support.paths import ROOT
from tests.support.quick_job import QUICK
from tests.support.waiting import LIMIT

GRACE = 25.0
"""Seconds from SIGTERM to SIGKILL in these tests; pods have 60."""
NUMBERS = itertools.count()
PHASES = ["import", "training", "export", "upload", "exit"]
STAY = {"training": "stay {} 3", "export": "stay {} export"}
"""Faults by which the rank that is struck is still in that phase."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with flyteadmin(tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
def job(cluster, tmp_path):
    """A function that runs a quick task's attempts; with `holds`, no upload ends before a strike lets it."""
    admin, storage = cluster

    def run(shape, fault="", holds=False, strike=None, **options):
        task = QUICK[shape]
        template = get_serializable(OrderedDict(), SETTINGS, task).template.to_flyte_idl()
        inputs = {"size": 1000, "steps": 5, "fault": fault}
        literals = TypeEngine.dict_to_literal_map(
            FlyteContextManager.current_context(), inputs, task.python_interface.inputs
        )
        environment = storage | {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(propeller.SITE)
        admin.looks = 0
        if holds:
            admin.uploads_end.clear()
        given = dict(literals.to_flyte_idl().literals)
        where = tmp_path / "work", environment, f"job{next(NUMBERS)}"
        try:
            return list(
                propeller.attempts(
                    admin, template, given, *where, strike=strike, **{"grace": GRACE} | options
                )
            )
        finally:
            admin.uploads_end.set()

    return run


def sigterm(admin, phase, index):
    """Return a function that deletes the pod of that index in that phase; uploads that are held may end after
    it."""
    words = {"import": "", "training": "step 2", "export": "export begins"}

    def is_there(pods):
        if phase == "upload":
            return bool(admin.arriving)
        if phase == "exit":
            return any(key.endswith("outputs.pb") for key in set(admin.keys("metadata/")) - before)
        return words[phase] in pods[index].log_text()

    before = set(admin.keys("metadata/"))

    def strike(pods):
        if is_there(pods):
            pods[index].delete()
            admin.uploads_end.set()

    return strike


def explain(attempts):
    """Return the results of the attempts, for the message of a failed test."""
    return [
        (
            attempt.condition,
            [pod.code for pod in attempt.pods],
            attempt.error and attempt.error.message[-900:],
            attempt.outputs is not None,
        )
        for attempt in attempts
    ]


@pytest.mark.journey
def test_pods_without_rank_0_wait_for_a_slow_upload(job, cluster):
    def strike(pods):
        if cluster[0].looks >= 2:
            cluster[0].uploads_end.set()

    (only,) = job("cpu-1x2", holds=True, strike=strike, cold=False)
    assert only.condition == "Succeeded"
    assert only.outputs is not None
    first, second = only.pods
    # The operator has deleted the pod that waited: rank 0's pod exited first, and keeps its log.
    assert (first.was_deleted, first.code) == (False, 0)
    assert (second.was_deleted, second.code) == (True, 0)


@pytest.mark.slow
def test_a_waiting_pod_that_is_killed_fails(job, cluster):
    def strike(pods):
        if cluster[0].arriving:
            pods[1].kill()
            cluster[0].uploads_end.set()

    first, second = job("cpu-1x2", holds=True, strike=strike)
    assert (first.condition, first.pods[1].code) == ("Failed", -9)
    assert second.outputs is not None


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1], ids=["rank-0", "another"])
@pytest.mark.parametrize("phase", PHASES)
def test_two_nodes_one_of_which_is_drained(phase, index, job, cluster):
    attempts = job(
        "cpu-1x2",
        fault=STAY.get(phase, "").format(index),
        holds=phase == "upload",
        strike=sigterm(cluster[0], phase, index),
    )
    *failed, last = attempts
    assert last.outputs is not None, explain(attempts)
    # A drained node costs one attempt; once the upload has begun, none.
    assert len(failed) <= (phase in ("import", "training", "export")), explain(attempts)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["cpu-1", "cpu-2"])
@pytest.mark.parametrize("phase", PHASES)
def test_one_node_that_is_drained(phase, shape, job, cluster):
    attempts = job(
        shape,
        fault=STAY.get(phase, "").format(0),
        holds=phase == "upload",
        strike=sigterm(cluster[0], phase, 0),
    )
    *failed, last = attempts
    assert last.outputs is not None, explain(attempts)
    assert len(failed) == (phase in ("import", "training", "export")), explain(attempts)
    if phase == "import":
        assert failed[0].pods[0].code in (-signal.SIGTERM, 128 + signal.SIGTERM), (
            "with nothing to save, it ends at once"
        )


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["cpu-1", "cpu-2"])
def test_an_interrupted_upload_is_repeated(shape, job, cluster):
    seen = []

    def strike(pods):
        if pods not in seen:
            seen.append(pods)
        if len(seen) == 2:  # the first attempt's pod was killed while it uploaded
            cluster[0].uploads_end.set()
        elif cluster[0].arriving:
            pods[0].delete()

    first, second = job(shape, holds=True, grace=1, strike=strike, strikes=2)
    assert first.condition == "Failed"
    assert second.outputs is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said", "attempts"),
    [
        ("kill 1 2", "rank 1: out of host memory: ended by SIGKILL", 2),
        ("bug 1 2", "rank 1: bug: KeyError: 'a bug'", 1),
    ],
    ids=["killed", "bug"],
)
def test_the_cause_is_shown_and_not_the_error_of_a_peer(fault, said, attempts, job):
    made = job("cpu-1x2", fault=fault)
    assert said in made[0].error.message
    assert "peer gone" not in made[0].error.message
    assert len(made) == attempts, explain(made)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["cpu-1", pytest.param("cpu-2", marks=pytest.mark.slow)])
def test_logs_of_pods_end_without_errors(shape, job):
    (only,) = job(shape)
    assert "ERROR" not in only.pods[0].log_text()


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """The context of a pod whose results are stored in a folder; signal handlers are restored afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(job_end, "POLL_SECONDS", 0.01)
    with setup_execution(str(tmp_path / "raw"), str(tmp_path / "handed")):
        yield tmp_path / "handed"
    signal.signal(signal.SIGTERM, before)


def test_the_size_of_the_upload_limits_the_wait_for_outputs(waiting, monkeypatch):
    monkeypatch.setattr(job_end, "SECONDS_BEFORE_UPLOAD", 0.1)
    with pytest.raises(StorageError, match=r"rank 0's pod has stored no outputs within 1 s") as failed:
        termination.wait_for_outputs(size=int(job_end.SLOWEST_UPLOAD))
    failure = reports.of_error(failed.value, rank=1)
    assert (failure.kind, failure.recoverable) == ("storage away", True)


@pytest.mark.parametrize("name", ["outputs.pb", "error-5f.pb"])
def test_the_wait_ends_with_outputs_or_an_error_and_the_operator_s_sigterm(name, waiting):
    before = signal.getsignal(signal.SIGTERM)

    def end():
        while signal.getsignal(signal.SIGTERM) == before:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
        waiting.mkdir()
        (waiting / name).touch()

    with ThreadPoolExecutor(1) as another:
        another.submit(end)
        termination.wait_for_outputs(size=0)


def test_pid_1_gets_no_signal_without_a_handler_unless_the_namespace_is_shared(tmp_path):
    if not kubelet.has_namespaces():
        pytest.skip("this machine's user may make no PID namespace")
    codes = []
    for shares in (False, True):
        command = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(100)"]
        log, grace = tmp_path / f"log-{shares}", LIMIT if shares else 2
        pod = kubelet.Pod(command, tmp_path, dict(os.environ), log, shares_processes=shares, grace=grace)
        kubelet.run([pod], lambda pods: pods[0].delete() if "up" in pods[0].log_text() else None)
        codes.append(pod.code)
    assert codes == [-signal.SIGKILL, 128 + signal.SIGTERM]
