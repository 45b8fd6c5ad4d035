"""Tests of elements of map tasks in pods, and of the reasons that they store."""

from types import SimpleNamespace

import pytest
from flytekit.bin import entrypoint
from flytekit.core.array_node_map_task import ArrayNodeMapTask
from flytekit.core.base_task import IgnoreOutputs
from flytekit.exceptions.user import FlyteUserRuntimeException

from flytune.errors import FlytuneError
from tasks.prepare import prepare_data
from tasks.runtime import mapping
from tasks.train import TRAIN
from tests.support.propeller import container_of
from tests.support.registration import FAST, proto

POD = SimpleNamespace(execution_state=SimpleNamespace(is_local_execution=lambda: False))


@pytest.fixture
def element(monkeypatch):
    """An element, and the reasons that it stores."""
    made, reasons = mapping.PointsTask.__new__(mapping.PointsTask), []
    monkeypatch.setattr(made, "_compute_array_job_index", lambda: 3, raising=False)
    monkeypatch.setattr(made, "_refuse_if_too_many_failed", lambda: None)
    monkeypatch.setattr(made, "_store_reason", lambda index, error: reasons.append((index, error)))
    return made, reasons


def end_with(monkeypatch, error):
    def dispatch_execute(self, ctx, inputs):
        raise error

    monkeypatch.setattr(ArrayNodeMapTask, "dispatch_execute", dispatch_execute)


def test_a_pod_without_rank_0_stores_no_reason(element, monkeypatch):
    made, reasons = element
    end_with(monkeypatch, FlyteUserRuntimeException(IgnoreOutputs()))
    with pytest.raises(FlyteUserRuntimeException):
        made.dispatch_execute(POD, None)
    assert reasons == []


def test_a_failed_element_stores_its_reason(element, monkeypatch):
    made, reasons = element
    error = FlyteUserRuntimeException(ValueError("x"))
    end_with(monkeypatch, error)
    with pytest.raises(FlyteUserRuntimeException):
        made.dispatch_execute(POD, None)
    assert reasons == [(3, error)]


def test_an_element_that_is_refused_is_not_retried(element, monkeypatch):
    made, reasons = element

    def refuse():
        raise FlytuneError("not run: 2 points had failed")

    monkeypatch.setattr(made, "_refuse_if_too_many_failed", refuse)
    with pytest.raises(
        FlyteUserRuntimeException
    ) as raised:  # a user's error, which flytekit does not call recoverable
        made.dispatch_execute(POD, None)
    assert "not run" in str(raised.value.value)
    assert len(reasons) == 1


@pytest.mark.parametrize(
    "task", [prepare_data, TRAIN["cpu-1"], TRAIN["h100-8x8"]], ids=lambda task: task.name
)
def test_a_registered_element_is_read_by_flytekit_s_commands(task, monkeypatch):
    """With fast registration, one command fetches the code, and starts that of the element."""
    started = []
    monkeypatch.setattr(entrypoint, "_download_distribution", lambda *places: started.append(places))
    monkeypatch.setattr(
        entrypoint, "_run_subprocess", lambda command, environment: started.append(command) or 0
    )
    made = mapping.map_points(task, "s3://flyte/notes/train/a", allowed_failures=3)
    command, _ = container_of(proto(made, FAST))
    assert command[0] == "pyflyte-fast-execute"
    with pytest.raises(SystemExit) as ended:
        entrypoint.fast_execute_task_cmd.main(command[1:], standalone_mode=False)
    assert ended.value.code == 0
    assert started[0] == ("s3://flyte/code.tar.gz", ".")
    slow, _ = container_of(proto(mapping.map_points(task, "s3://flyte/notes/train/a", allowed_failures=3)))
    for name, *arguments in (started[1], slow):
        assert name == "pyflyte-map-execute"
        read = entrypoint.map_execute_task_cmd.make_context(name, arguments).params
        assert read["resolver"] == mapping.PointsResolver().name()
        loaded = mapping.PointsResolver().load_task(list(read["resolver_args"]))
        assert (loaded.notes, loaded.allowed_failures, loaded._run_task) == (
            "s3://flyte/notes/train/a",
            3,
            task,
        )
