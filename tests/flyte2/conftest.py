"""Fixtures of the local modes of both faces."""

from tests.support.flyte2 import home2

__all__ = ["home2"]
