"""Progress bars as lines if there is no terminal, and suppression of useless warnings.

Each process that shows something calls `install`: the command line, pods, ranks, and processes that evaluate.
The libraries (transformers, datasets, huggingface_hub) use tqdm's bars, as Flytune does.
"""

import atexit
import functools
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.std import tqdm

from flytune import patches

SECONDS = 30.0
"""Seconds between two lines of a bar."""
DELAY = 10.0
"""Seconds until a bar is shown that sets no delay itself, as the libraries' do not: most of theirs end at
once."""
_HIDDEN = ("Writing model shards", "Generating train split")
"""Titles of libraries' bars that are never shown: a save is in the lines of the run, and the data's split is
not a user's."""
_NOTICES = [
    # transformers and PEFT, about each other's older names.
    (FutureWarning, ".*is deprecated and will be removed in v6"),
    # DeepSpeed about torch, and torch about itself.
    (FutureWarning, "`torch\\.distributed\\.[a-z_]*` is deprecated"),
    # PEFT about patterns of experts' parameters, which it looks for among modules, and applies; Flytune has
    # checked every key.
    (RuntimeWarning, "The following (rank|alpha)_pattern keys did not match any targeted module"),
    # bitsandbytes about its optimizers on a CPU, which has no memory to page out.
    (UserWarning, "Paged optimizers are not supported on CPU"),
    # click about flytekit, which declares the option of a bool input twice.
    (UserWarning, "The parameter --\\w+ is used more than once"),
]
"""Warnings of the pinned libraries about each other: category and message."""
_LOGGERS = {
    # bitsandbytes has no such kernel for a CPU, and computes without it.
    "bitsandbytes.backends.cpu.ops": logging.ERROR,
}
"""Loggers of the libraries, and the lowest level that is shown."""
_MESSAGES = {
    # transformers' table of parameters without values, and of values without a parameter.
    # flytune.models.loading names those that matter. transformers' own error for a parameter of another shape
    # refers to the table.
    "transformers.modeling_utils": re.compile(r"(?s)LOAD REPORT(?!.*(MISMATCH|CONVERSION))"),
    # transformers about a resume on another number of processes, whose batches are in the table of attempts.
    "transformers.trainer_utils": re.compile(
        r"(?s)do not match the ones in the `trainer_state.json`(?!.*_steps: )"
    ),
    # torch's launcher about a signal, which the run's own lines name.
    "torch.distributed.elastic.agent.server.api": re.compile("Received %s death signal"),
    "torch.distributed.elastic.multiprocessing.api": re.compile("Closing process %s via signal"),
    # Liger about kernels for other devices; it uses those that it has for this one.
    "liger_kernel.backends.registry": re.compile("could not be imported"),
}
"""Loggers of the libraries, and the messages that they do not show."""


def install() -> None:
    """Show this process's bars as lines where there is no terminal, and suppress warnings; later calls do
    nothing."""
    if patches.tqdm.BAR.is_installed:
        return
    patches.tqdm.BAR.install(_with_lines(patches.tqdm.BAR.original()))
    part_from_forks()
    for category, message in _NOTICES:
        warnings.filterwarnings("ignore", message, category)
    for name, level in _LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    for name, hidden in _MESSAGES.items():
        logging.getLogger(name).addFilter(functools.partial(_is_shown, hidden))
    # Close bars that are still open: when they are deleted, this module may be gone.
    atexit.register(lambda: [bar.close() for bar in list(tqdm._instances)])


def part_from_forks() -> None:
    """Give this process's bars a lock of their own.

    tqdm's is shared with forked processes: one that is killed while it writes a bar would keep it, and this
    process would wait for ever.
    """
    tqdm.set_lock(threading.RLock())


@contextmanager
def named(label: str, delay: float) -> Iterator[None]:
    """Give bars that libraries make within the block another title, and show them after `delay` seconds."""
    install()
    before = dict(_given)
    _given.update(desc=label, delay=delay)
    try:
        yield
    finally:
        _given.clear()
        _given.update(before)


_given: dict[str, Any] = {}
"""Arguments that replace those of bars which are made now."""


def _with_lines(upstream: Any) -> Any:
    """Return tqdm's __init__, with a file of lines where there is no terminal."""

    @functools.wraps(upstream)
    def init(bar: Any, iterable: Any = None, desc: Any = None, *arguments: Any, **settings: Any) -> None:
        settings = {"delay": DELAY, "desc": desc} | settings | _given
        # The hub's `disable=None` hides bars without a terminal; they are shown as lines instead.
        if settings.get("disable", False) is None:
            settings["disable"] = False
        if str(settings["desc"]).startswith(_HIDDEN):
            settings["disable"] = True
        file = settings.get("file") or sys.stderr
        if not settings.get("gui") and not (_is_first() and getattr(file, "isatty", bool)()):
            settings["file"] = _Lines(bar, file)
        upstream(bar, iterable, settings.pop("desc"), *arguments, **settings)

    return init


def _is_shown(hidden: re.Pattern[str], record: logging.LogRecord) -> bool:
    return hidden.search(str(record.msg)) is None


def _is_first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


class _Lines:
    """File of a bar without a terminal: what tqdm draws becomes a line at the start, one every SECONDS, and
    one at the end.

    Only the first rank of a node prints them.
    """

    def __init__(self, bar: Any, file: Any) -> None:
        self._bar, self._file = bar, file
        self._printed: float | None = None

    def write(self, drawn: str) -> None:
        """Print the bar, whatever part of it, or movement of a cursor, tqdm has `drawn`."""
        bar, now = self._bar, time.monotonic()
        if bar is None:
            return
        if bar.disable:  # it is being closed
            self._bar = None
            if self._printed is not None:
                self._print(bar)
        elif self._printed is None or now - self._printed >= SECONDS:
            self._printed = now
            if bar.total is None or bar.n < bar.total:
                self._print(bar)

    def flush(self) -> None:
        """Do nothing: each line is flushed."""

    def _print(self, bar: Any) -> None:
        if not _is_first():
            return
        # As tqdm at the end: the mean rate of the whole run, not the latest one.
        values = bar.format_dict | ({"rate": None} if bar.disable else {})
        self._file.write(f"{bar.format_meter(**values).strip()}\n")
        self._file.flush()
