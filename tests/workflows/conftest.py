"""Fixtures that tests of other folders use too."""

from tests.support.pyflyte import local_cache
from tests.support.sweeps import changes

__all__ = ["changes", "local_cache"]
