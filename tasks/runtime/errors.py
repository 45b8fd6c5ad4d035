"""Errors of ours as pyflyte shows them: alone, without the frames that led there; `pyflyte -v run` shows those."""

import logging
import re
import sys
from collections.abc import Iterator

from flytune.cli import print_error
from flytune.errors import FlytuneError
from tasks.runtime.retries import RunFailed

_PYFLYTE = "flytekit.clis.sdk_in_container.utils"
# flytekit puts it before the message of whatever a task raises on this machine, once for each task around it.
_WITHIN = re.compile(r"\A(?:Error encountered while [^\n]*:\n\s*)+")


def install() -> None:
    """Change how pyflyte shows errors; do nothing in a process that is not pyflyte's, as in pods."""
    pyflyte = sys.modules.get(_PYFLYTE)
    if pyflyte is None or getattr(pyflyte.pretty_print_exception, "is_ours", False):
        return
    whole = pyflyte.pretty_print_exception

    def shown(error: Exception, verbosity: int = 1) -> None:
        """Print an error of ours alone; all others, bugs too, as flytekit does."""
        if verbosity or (ours := of_ours(error)) is None:
            whole(error, verbosity)
        else:
            print_error(ours)

    shown.is_ours = True  # type: ignore[attr-defined]
    # torch's own report of a rank that failed; ours names the first one, and has the frames of a bug.
    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn"):
        logging.getLogger(name).addFilter(lambda _: logging.getLogger("flytekit").isEnabledFor(logging.ERROR))
    pyflyte.pretty_print_exception = shown  # type: ignore[attr-defined]


def of_ours(error: BaseException) -> FlytuneError | RunFailed | None:
    """Return the error of ours that `error` is or was raised for, with our message alone; None where it is another's."""
    found = next((link for link in _links(error) if isinstance(link, FlytuneError | RunFailed)), None)
    if found is not None:
        found.args = (_WITHIN.sub("", str(found)),)
    return found


def _links(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        value = getattr(error, "value", None)  # that flytekit has wrapped
        error = value if isinstance(value, Exception) else error.__cause__
