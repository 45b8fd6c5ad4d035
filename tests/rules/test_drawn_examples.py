"""Drawn examples of hypothesis: none fails because the machine is slow, and each run has the same."""

from hypothesis import HealthCheck, settings


def test_an_example_may_take_as_long_as_the_machine_needs():
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
    assert settings(max_examples=60).deadline is None


def test_each_run_has_the_same_examples():
    assert settings(max_examples=60).derandomize
    assert settings().database is None
