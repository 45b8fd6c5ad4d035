"""Answers to files of prompts."""

from flytune.inference.prompts import PromptPart

__all__ = ["PromptPart"]
