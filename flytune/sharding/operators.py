"""DeepSpeed's operators that are compiled where they are first used: by one process at a time, and again
after one that was killed."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flytune.errors import TrainingError

log = logging.getLogger(__name__)


def load(offload: str) -> None:
    """Load the operators of optimizer states that are offloaded to `cpu` or `nvme`, and compile those that
    are not installed.

    torch marks a folder that it compiles in by a file, and waits while it is there: a process that is killed
    meanwhile leaves it, and all later ones would wait for ever.

    Raises:
        TrainingError: they cannot be compiled.
    """
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    builders = [CPUAdamBuilder(), AsyncIOBuilder()] if offload == "nvme" else [CPUAdamBuilder()]
    for builder in builders:
        if installed_ops.get(builder.name):
            continue
        folder = _folder(builder)
        with _alone(folder):
            remove_abandoned(folder / "lock")
            if not (folder / f"{builder.name}.so").exists():
                log.warning("DeepSpeed's operator %s is compiled, once: some minutes", builder.name)
            try:
                builder.load(verbose=False)
            except (RuntimeError, OSError) as error:
                raise TrainingError(
                    f"DeepSpeed's operator {builder.name}, which sharding.offload: {offload} needs, cannot "
                    f"be compiled in {folder}: {' '.join(str(error).split())[:500]}; install a C++ compiler "
                    "and ninja, or use the training image, which has it"
                ) from error


def _folder(builder: Any) -> Path:
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(builder.name, verbose=False))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time in; the kernel ends the turn of one that is killed."""
    with (folder / "flytune.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_abandoned(lock: Path) -> None:
    """Remove torch's mark of a folder that no process of this machine compiles in any more."""
    if lock.exists() and not _is_open(lock):
        log.warning("%s: a compilation was killed; it is begun anew", lock.parent)
        lock.unlink(missing_ok=True)


def _is_open(path: Path) -> bool:
    """Return whether a process that can be looked into has a file open."""
    wanted = os.path.realpath(path)
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.path.realpath(descriptor) == wanted for descriptor in descriptors.iterdir()):
                return True
        except OSError:
            # It has ended, or is another user's.
            continue
    return False
