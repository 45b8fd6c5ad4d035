"""Records of attempts, of processes that are killed too, and the decision of the next attempt."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from flytune.errors import DataError, KilledAgain, Preempted
from flytune.failures import reports
from flytune.hardware import pod_memory
from flytune.pods import spec
from flytune.records import Attempt, Need, Plan
from flytune.records.plan import EXPORT
from flytune.stages import attempts
from flytune.training import AttemptWriter, attempt_notes, earlier_attempts
from flytune.training import attempt as writer
from tasks.runtime import orchestrator, retries
from tests.support.attempts import attempt, execution  # noqa: F401 (fixtures)
from tests.support.paths import ROOT
from tests.support.waiting import LIMIT, until

GIB = 2**30


def stop_message(place, number, saved_step=0):
    os.environ["FLYTE_ATTEMPT_NUMBER"] = str(number)
    try:
        with AttemptWriter(str(place)).keeping(lambda: saved_step):
            return None
    except KilledAgain as error:
        return str(error)
    finally:
        del os.environ["FLYTE_ATTEMPT_NUMBER"]


def test_no_third_attempt_where_two_were_killed_in_the_same_phase(tmp_path):
    assert attempt(tmp_path, 0) == -signal.SIGKILL
    assert attempt(tmp_path, 1) == -signal.SIGKILL
    said = stop_message(tmp_path, 2)
    assert said.startswith("attempts 1 and 2 were killed without a report in the same phase, load, at ")
    assert f"Checkpoints are at {tmp_path}" in said
    (*_, last) = earlier_attempts.read(str(tmp_path), "abc")
    assert (last.retry, last.kind) == (2, "killed again")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "saved_step"),
    [
        ({"phase": "load"}, {"phase": "steady step"}, 0),
        ({"end": "SIGTERM"}, {"end": "SIGTERM"}, 0),
        ({"end": "SIGTERM"}, {}, 0),
        ({}, {"end": "SIGTERM"}, 0),
        ({"end": Preempted("x")}, {"end": Preempted("x")}, 0),
        ({"end": DataError("x")}, {}, 0),
        ({}, {"end": ConnectionError("x")}, 0),
        # Steps were saved by the first attempt, or by the second.
        ({}, {"saved_step": 10}, 10),
        ({}, {}, 10),
        # Another execution: somebody has restarted the run.
        ({"execution": "before"}, {"execution": "before"}, 0),
        ({"execution": "before"}, {}, 0),
    ],
)
def test_other_ends_do_not_stop_a_run(first, second, saved_step, tmp_path):
    attempt(tmp_path, 0, **first)
    attempt(tmp_path, 1, **second)
    assert stop_message(tmp_path, 2, saved_step) is None


def test_one_kill_or_two_with_another_attempt_between_do_not_stop_a_run(tmp_path):
    attempt(tmp_path, 0)
    assert stop_message(tmp_path, 1) is None
    attempt(tmp_path, 0)
    attempt(tmp_path, 2)
    assert stop_message(tmp_path, 3) is None


def test_memory_errors_count_as_kills(tmp_path):
    attempt(tmp_path, 0, end=MemoryError())
    attempt(tmp_path, 1)
    assert "attempts 1 and 2" in stop_message(tmp_path, 2)


@pytest.mark.parametrize(
    ("other", "is_stop"), [(RuntimeError("Connection closed by peer"), True), (DataError("x"), False)]
)
def test_a_killed_node_counts_unless_another_reports_the_cause(other, is_stop, tmp_path):
    for number in (0, 1):
        attempt(tmp_path, number, node=1)
        attempt(tmp_path, number, node=0, end=other)
    assert (stop_message(tmp_path, 2) is not None) == is_stop


def test_a_successful_attempt_that_trains_nothing_leaves_no_record(tmp_path):
    attempt(tmp_path, 0)
    assert attempt(tmp_path, 1, end="done") == 0
    assert earlier_attempts.read(str(tmp_path)) == []


def test_runs_without_flyte_and_checkpoints_leave_no_record(tmp_path, monkeypatch):
    monkeypatch.delenv("FLYTE_INTERNAL_EXECUTION_ID")
    with AttemptWriter(str(tmp_path)).keeping():
        assert list(tmp_path.iterdir()) == []


def test_an_unavailable_storage_delays_nothing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(writer, "WAIT", 0.2)
    (tmp_path / "file").write_text("no folder")
    with AttemptWriter(str(tmp_path / "file")).keeping():
        pass
    until(lambda: "the record of phase load could not be written" in caplog.text)


def test_a_record_has_the_used_memory_as_it_grows(tmp_path, monkeypatch):
    used = [GIB]
    monkeypatch.setattr(writer, "memory", lambda: (used[0], 16 * GIB))
    monkeypatch.setattr(writer, "SECONDS", 0.02)
    mine = AttemptWriter(str(tmp_path))
    with mine.keeping():
        assert earlier_attempts.read(str(tmp_path))[0].used_bytes == GIB
        used[0] = 15 * GIB
        until(lambda: earlier_attempts.read(str(tmp_path))[0].used_bytes == 15 * GIB)
        (record,) = earlier_attempts.read(str(tmp_path))
        assert record.last_seen == "train_l4_1, attempt 1, load: 15.0 of 16.0 GiB of the pod's memory"
        mine.enter(EXPORT)
        (record,) = earlier_attempts.read(str(tmp_path))
        assert record.phase == "export"


def plan_with(need):
    return Plan.model_construct(needs=[need], processes=4)


def test_a_cpu_shapes_processes_are_counted_together():
    need = Need(resource="process memory", available_bytes=GIB, phases={"load": {"process": GIB}})
    assert plan_with(need).host_bytes("load") == 4 * GIB
    assert plan_with(need).host_bytes("export") is None


@pytest.mark.parametrize(
    ("version", "limit", "expected"),
    [
        (2, str(4 * GIB), (2 * GIB, 4 * GIB)),
        (1, str(4 * GIB), (2 * GIB, 4 * GIB)),
        (2, "max", None),
        (1, "9223372036854771712", None),
    ],
)
def test_the_pods_memory_is_the_kernels_figure(version, limit, expected, tmp_path, monkeypatch):
    (tmp_path / "used").write_text(f"{3 * GIB}\n")
    (tmp_path / "limit").write_text(f"{limit}\n")
    (tmp_path / "stat").write_text(f"anon 5\n{'total_' if version == 1 else ''}inactive_file {GIB}\n")
    monkeypatch.setattr(
        pod_memory, "_cgroups", lambda: [(tmp_path / "used", tmp_path / "limit", tmp_path / "stat")]
    )
    used, allowed = pod_memory.memory()
    if expected:
        assert (used, allowed) == expected
    else:
        assert 0 < used < allowed == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def evaluate(place, attempt, number):
    os.environ["FLYTE_ATTEMPT_NUMBER"] = str(attempt)
    with (
        mock.patch.object(retries, "attempts_address", return_value=place),
        retries.classified(),
        attempts.record_phase("evaluate", place),
    ):
        if number:
            os.kill(os.getpid(), number)
            time.sleep(LIMIT)


@pytest.mark.parametrize(("number", "is_stop"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_a_pod_that_evaluates_is_not_tried_a_third_time_either(number, is_stop, tmp_path, monkeypatch):
    for number_of_attempt in (0, 1):
        one = multiprocessing.get_context("fork").Process(
            target=evaluate, args=(str(tmp_path), number_of_attempt, number)
        )
        one.start()
        one.join(LIMIT)
        assert one.exitcode == (-number if number == signal.SIGKILL else 143)
    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "2")
    if is_stop:
        with pytest.raises(
            KilledAgain,
            match="attempts 1 and 2 were killed without a report in the same phase, evaluate, at ",
        ):
            evaluate(str(tmp_path), 2, None)
    else:
        evaluate(str(tmp_path), 2, None)
        assert earlier_attempts.read(str(tmp_path)) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_attempts_of_a_task_have_an_address_in_common(monkeypatch):
    monkeypatch.setattr(
        orchestrator.Flyte, "shared_address", lambda self, name: f"s3://bucket/flytune-{name}"
    )
    command = ["pyflyte-execute", "--inputs", "s3://bucket/metadata/n3/data/inputs.pb", "--output-prefix"]
    places = []
    for output, index in (("0", ""), ("1", ""), ("0", "1")):
        monkeypatch.setattr(sys, "argv", [*command, f"s3://bucket/metadata/n3/data/{output}"])
        monkeypatch.setenv("BATCH_JOB_ARRAY_INDEX_VAR_NAME", "FLYTE_K8S_ARRAY_INDEX")
        monkeypatch.setenv("FLYTE_K8S_ARRAY_INDEX", index)
        places.append(orchestrator.attempts_address())
    first, retry, part = places
    assert first == retry != part
    assert first.startswith("s3://bucket/flytune-phases/abc/")


def test_an_action_for_the_same_stage_is_the_next_attempt(tmp_path, monkeypatch):
    attempt(tmp_path, 0, phase="steady step", action="a1")
    attempt(tmp_path, 1, end=DataError("x"), action="a1")
    # Flyte 2's driver starts another action, which counts its own attempts from 0 on.
    monkeypatch.setenv("FLYTUNE_ACTION", "a2")
    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "0")
    with contextlib.suppress(ConnectionError), AttemptWriter(str(tmp_path)).keeping():
        records = earlier_attempts.read(str(tmp_path), "abc")
        first, second, third = earlier_attempts.lines(records, "abc")
        assert first.startswith("attempt 1: killed without a report: steady step, ")
        assert second.startswith("attempt 2: bad data: x, node ")
        assert third.startswith("attempt 3: killed without a report: load, ")
        assert [record.number for record in records] == [1, 2, 3]
        raise ConnectionError
    monkeypatch.setenv(spec.RETRIES, "3")
    outcome, *ends = attempts.text_of(reports.of_error(ConnectionError("x"), 0)).further
    assert outcome == "recoverable: attempt 3 of 6; Flyte starts another"
    assert ends[:2] == [first, second]


def test_figures_of_release_0_2_are_no_kills_in_the_same_phase(tmp_path):
    for name in ("record-0001-e1239377.json", "record-0002-98b2287b.json"):
        figures = Attempt.read(ROOT / "tests/support/attempts_of_0_2" / name)
        figures.model_copy(update={"resumed_from_step": 0}).write(tmp_path / name)
    assert stop_message(tmp_path, 2) is None


def test_files_of_release_0_2_are_read(tmp_path, monkeypatch, capsys):
    """Two attempts have left them: one hung in step 4, the next one resumed at step 2 and was killed in step
    6."""
    shutil.copytree(ROOT / "tests/support/attempts_of_0_2", tmp_path, dirs_exist_ok=True)
    place = str(tmp_path)
    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "2")
    plan = Plan.model_construct(
        shape="cpu-2",
        world_size=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        needs=[],
        price_per_hour=1.0,
    )
    args = SimpleNamespace(
        process_index=0, world_size=2, per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    third = AttemptWriter(place, plan, has_checkpoints=True)
    with third.keeping(lambda: 4):
        third.resume(args, 4)
        earlier = third.earlier([], 0.0)
    assert capsys.readouterr().out.strip() == (
        f"attempt 3: resumes at step 4 from {place}; attempt 1: hang: nothing finished for 600 s, node n1; "
        "attempt 2: killed without a report: steady step, 2.6 of 23.5 GiB of the pod's memory, node n1"
    )
    assert [(one.number, one.resumed_from_step, one.last_step, one.price_per_hour) for one in earlier] == [
        (1, 0, 3, 1.5),
        (2, 2, 5, 1.5),
    ]
    assert [one.ended.partition(",")[0] for one in earlier] == [
        "hang: nothing finished for 600 s",
        "killed without a report: steady step",
    ]
    notes = attempt_notes.read(place, "o", halves_on="cpu-2")
    assert (notes.left_out, notes.rollbacks, notes.applied(plan).gradient_accumulation_steps) == ([4], 1, 2)
    earlier_attempts.clear(place)
    assert list(tmp_path.iterdir()) == []
