"""Fixtures that tests of other folders use too."""

from tests.support.sweeps import changes

__all__ = ["changes"]
