"""Held-out loss, sample answers, guards, evaluation tasks."""

__all__ = ["guards", "score", "tasks"]
