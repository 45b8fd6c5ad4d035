"""Evaluation by lm-evaluation-harness: its tasks, their data, and the runs."""

__all__ = ["data", "run"]
