"""Fixtures that other folders use too."""

from tests.support.data_hub import hub

__all__ = ["hub"]
