"""The trained weights as a Hugging Face folder, and the gate that checks it."""

from flytune.export.folder import trained_folder

__all__ = ["trained_folder"]
