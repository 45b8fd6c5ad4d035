"""Fixtures of the harness's tests: a tiny base model, a folder of tasks, and a hub of data sets."""

from tests.support.data_hub import hub
from tests.support.harness import own

__all__ = ["hub", "own"]
