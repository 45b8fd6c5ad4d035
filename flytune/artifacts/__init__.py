"""Building, fetching, listing and publishing artifacts."""

from flytune.artifacts.catalog import Entry

__all__ = ["Entry"]
