"""Fixtures of several modules of this folder."""

from tests.support.mock_hub import hub

__all__ = ["hub"]
