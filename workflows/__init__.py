"""Flyte workflows: wiring only."""
