"""Drawn examples of hypothesis: none fails because the machine is slow."""

from hypothesis import HealthCheck, settings


def test_an_example_may_take_as_long_as_the_machine_needs():
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
    assert settings(max_examples=60).deadline is None
