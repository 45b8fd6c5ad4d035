"""Held-out loss, sample answers, guards, lm-evaluation-harness."""

__all__ = ["guards", "harness", "score"]
