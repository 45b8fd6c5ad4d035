"""Served models: whether an endpoint answers as the model that was trained."""

from flytune.serving.verification import Verification, verify

__all__ = ["Verification", "verify"]
