"""Names of fsspec that are replaced."""

from flytune.patches.record import BlockPatch

_REASON = (
    "Flyte 2's SDK puts obstore's file systems in the place of s3fs and gcsfs for all of fsspec when "
    "it is imported"
)
_UPSTREAM = ("fsspec.registry:get_filesystem_class", "fsspec.registry:register_implementation")

IMPLEMENTATIONS, REGISTRY = (
    BlockPatch(
        name=f"fsspec.registry:{name}",
        version="2026.9.0",
        reason=_REASON,
        upstream=_UPSTREAM,
        remove_when="the SDK opens its own file systems by name",
    )
    for name in ("_registry", "registry")
)
"""The file systems that are loaded, and the same for reading alone."""
