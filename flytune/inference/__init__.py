"""Answers to files of prompts."""

from flytune.inference.prompts import Part

__all__ = ["Part", "batch", "prompts"]
