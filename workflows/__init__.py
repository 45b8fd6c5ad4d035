"""Flyte workflows, which only connect tasks; inputs.py converts their inputs."""

from workflows import inputs as inputs
