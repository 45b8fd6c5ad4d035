"""Flytune: fine-tune language models on Flyte, from one recipe to one checked artifact."""

__version__ = "0.2.0"
"""Version, which pyproject.toml reads too. No installed package is asked: the images import the project from
a folder."""
