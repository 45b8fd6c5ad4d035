"""Memory of a pod, as the kernel counts it."""

from collections.abc import Iterator
from pathlib import Path


def memory() -> tuple[int, int]:
    """Return bytes of memory in use, without page cache that can be dropped, and bytes allowed: the pod's, or
    the machine's."""
    sizes = {key: int(value.split()[0]) * 1024 for key, value in _pairs(Path("/proc/meminfo"), ":")}
    total = sizes["MemTotal"]
    for used, limit, cache in _cgroups():
        try:
            allowed = limit.read_text(encoding="ascii").strip()
            if allowed == "max" or int(allowed) >= total:
                continue
            dropped = next(
                (int(size) for key, size in _pairs(cache, " ") if key.endswith("inactive_file")), 0
            )
            return int(used.read_text(encoding="ascii")) - dropped, int(allowed)
        except (OSError, ValueError):
            continue
    return total - sizes["MemAvailable"], total


def _pairs(file: Path, separator: str) -> Iterator[tuple[str, str]]:
    for line in file.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(separator)
        yield key, value.strip()


def _cgroups() -> Iterator[tuple[Path, Path, Path]]:
    """List files of use, limit and statistics: of cgroup v2 and v1, each as a container sees its own, and as
    a machine does."""
    try:
        mounts = [
            line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
        ]
    except OSError:
        mounts = []
    for root, controllers, used, limit in (
        ("/sys/fs/cgroup", "", "memory.current", "memory.max"),
        ("/sys/fs/cgroup/memory", "memory", "memory.usage_in_bytes", "memory.limit_in_bytes"),
    ):
        paths = [path for _, names, path in mounts if controllers in names.split(",")]
        for folder in (*(Path(root + path) for path in paths), Path(root)):
            yield folder / used, folder / limit, folder / "memory.stat"
