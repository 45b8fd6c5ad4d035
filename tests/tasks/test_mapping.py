"""Tests of elements of map tasks in pods, and of the reasons that they store."""

from types import SimpleNamespace

import pytest
from flytekit.core.array_node_map_task import ArrayNodeMapTask
from flytekit.core.base_task import IgnoreOutputs
from flytekit.exceptions.user import FlyteUserRuntimeException

from flytune.errors import FlytuneError
from tasks.runtime import mapping

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
    with pytest.raises(FlyteUserRuntimeException) as raised:  # a user's error, which flytekit does not call recoverable
        made.dispatch_execute(POD, None)
    assert "not run" in str(raised.value.value)
    assert len(reasons) == 1
