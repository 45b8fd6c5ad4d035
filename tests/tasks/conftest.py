"""Fixtures that other folders use too."""

from tests.support.harness import base, own
from tests.support.pyflyte import local_cache

__all__ = ["base", "local_cache", "own"]
