"""File systems of stages: fsspec's own, as on Flyte 1."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

from obstore.fsspec import FsspecStore

from flytune import patches


@contextmanager
def fsspec_s_own() -> Iterator[None]:
    """Use fsspec's own file systems in the block.

    The SDK replaces those of s3://, gs:// and abfs:// by obstore's, whose settings and errors are others, and
    uses them itself outside the block.
    """
    loaded = patches.fsspec.IMPLEMENTATIONS.current()
    implementations = {name: kind for name, kind in loaded.items() if not issubclass(kind, FsspecStore)}
    with (
        patches.fsspec.IMPLEMENTATIONS.replaced(implementations),
        patches.fsspec.REGISTRY.replaced(MappingProxyType(implementations)),
    ):
        yield
