"""Held-out loss, sample answers, guards, evaluation tasks."""
