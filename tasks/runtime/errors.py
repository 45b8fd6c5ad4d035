"""Display of Flytune's errors by pyflyte: the message without the traceback, which `pyflyte -v run` shows."""

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from flytune import patches
from flytune.console import error_lines
from flytune.errors import DataError, FlytuneError, chain
from tasks.runtime.retries import RunFailed

_PYFLYTE = "flytekit.clis.sdk_in_container.run"
# flytekit's prefix of the message of an error that a task raises on this machine, once for each enclosing
# task.
_PREFIX = re.compile(r"\A(?:Error encountered while [^\n]*:\n\s*)+")

_LOCAL_FOLDER = re.compile(r'uri: "(/[^"]+)"')


def is_pyflyte() -> bool:
    """Return whether this process is pyflyte's, and not one that imports tasks by itself, such as a pod or a
    script."""
    return _PYFLYTE in sys.modules


def install() -> None:
    """Change how pyflyte shows errors; later calls do nothing."""
    if patches.flytekit.SHOWN_ERROR.is_installed:
        return
    upstream = patches.flytekit.SHOWN_ERROR.original()

    def shown(error: Exception, verbosity: int = 1) -> None:
        """Print only the message of Flytune's errors; leave all others, bugs too, to flytekit."""
        if verbosity or (refusal := own_error(error)) is None:
            upstream(error, verbosity)
        else:
            error_lines.show(refusal)

    # Hide torch's report of a failed rank: ours names the rank that failed first, and has the traceback of a
    # bug.
    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn"):
        logging.getLogger(name).addFilter(lambda _: logging.getLogger("flytekit").isEnabledFor(logging.ERROR))
    patches.flytekit.SHOWN_ERROR.install(shown)


def own_error(error: BaseException) -> FlytuneError | RunFailed | None:
    """Return Flytune's error that `error` is or was raised from, without flytekit's prefix; None if there is
    none.

    flytekit's own error about a cached local result whose folder is gone becomes one of Flytune's.
    """
    refusal = next((link for link in _links(error) if isinstance(link, FlytuneError | RunFailed)), None)
    if refusal is not None:
        refusal.args = (_PREFIX.sub("", str(refusal)),)
    return refusal or next((gone for link in _links(error) if (gone := _gone(link))), None)


def _gone(error: BaseException) -> DataError | None:
    if type(error).__name__ != "TypeTransformerFailedError":
        return None
    path = next((path for path in _LOCAL_FOLDER.findall(str(error)) if not Path(path).exists()), None)
    if path is None:
        return None
    return DataError(
        f"{path}: the folder of a cached local result is gone, as temporary folders are after a restart of "
        "the machine; clear the cache with `pyflyte local-cache clear` and run again"
    )


def _links(error: BaseException) -> Iterator[BaseException]:
    for link in chain(error, "none"):
        yield link
        wrapped = getattr(link, "value", None)  # the error that flytekit has wrapped
        if isinstance(wrapped, Exception) and wrapped is not link:
            yield from _links(wrapped)
            return
