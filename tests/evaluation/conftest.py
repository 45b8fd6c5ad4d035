"""Fixtures of several modules here."""

from tests.support.data_hub import hub
from tests.support.harness import base, own

__all__ = ["base", "hub", "own"]
