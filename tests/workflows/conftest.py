"""Fixtures that other folders use too."""

from tests.support.pyflyte import local_cache

__all__ = ["local_cache"]
