"""Evaluation by lm-evaluation-harness, a kind of evaluation tasks."""

from flytune.evaluation.harness.run import Harness

__all__ = ["KIND"]

KIND = Harness()
