"""Flyte tasks: what runs where. Imports no task: a CPU pod imports the prepare task without torch."""
