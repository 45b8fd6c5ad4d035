"""Fixtures of this folder."""

from tests.support.data_hub import hub as answering_hub

__all__ = ["answering_hub"]
