"""Errors of a model whose sizes cannot be counted."""


class SizesError(Exception):
    """A model whose sizes are missing, wrong, or cannot be counted; the message begins with the model's
    name."""


class LibrariesMissingError(SizesError):
    """A model that can only be counted where torch and transformers are installed."""
