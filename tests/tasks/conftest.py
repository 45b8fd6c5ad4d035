"""Fixtures that tests of other folders use too."""

from tests.support.harness import own
from tests.support.pyflyte import local_cache

__all__ = ["local_cache", "own"]
