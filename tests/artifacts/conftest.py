"""Fixtures of several modules here."""

from tests.support.publishing import hub

__all__ = ["hub"]
