"""Flyte workflows: wiring only. What goes into them: inputs.py."""

from workflows import inputs as inputs
