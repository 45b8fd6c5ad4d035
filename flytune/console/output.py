"""The output of a process while it works: progress bars as lines where there is no terminal, and no notices of no use.

In force in every process that imports flytune: ranks, evaluation and the harness in processes of their own, forked workers,
pods, the command line. Bars of the libraries (transformers, datasets, huggingface_hub) are tqdm's, as ours are.
"""

import atexit
import functools
import logging
import os
import time
import warnings
from typing import Any

from tqdm.std import tqdm

SECONDS = 30.0
"""Seconds between two lines of a bar."""
_NOTICES = [
    # transformers and PEFT of each other's older names.
    (FutureWarning, ".*is deprecated and will be removed in v6"),
    # DeepSpeed of torch, and torch of itself.
    (FutureWarning, "`torch\\.distributed\\.[a-z_]*` is deprecated"),
    # bitsandbytes of its optimizers on a CPU, which has no memory to page out.
    (UserWarning, "Paged optimizers are not supported on CPU"),
]
"""Warnings of the pinned libraries about each other: category and message."""
_LOGGERS = {
    # A kernel that bitsandbytes does not ship for a CPU: it computes without.
    "bitsandbytes.backends.cpu.ops": logging.ERROR,
}


def install() -> None:
    """Change how this process's bars are shown, and what is silent; once, however often it is called."""
    if tqdm.display is _display:
        return
    tqdm.__init__ = _init
    tqdm.display, tqdm.close, tqdm.clear, tqdm.moveto = _display, _close, _clear, _moveto
    for category, message in _NOTICES:
        warnings.filterwarnings("ignore", message, category)
    for name, level in _LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    # Of bars that nobody closed: at their own end this module may be gone.
    atexit.register(lambda: [bar.close() for bar in list(tqdm._instances)])


_begin, _frame, _end, _erase, _move = tqdm.__init__, tqdm.display, tqdm.close, tqdm.clear, tqdm.moveto


@functools.wraps(_begin)
def _init(bar: Any, *arguments: Any, **settings: Any) -> None:
    """Make the bar; `disable=None`, off without a terminal, is the hub's: there it is lines."""
    if settings.get("disable", False) is None:
        settings["disable"] = False
    _begin(bar, *arguments, **settings)


def _draws(bar: Any) -> bool:
    """Return whether the bar is drawn by tqdm: on a terminal, by the first of a node's ranks."""
    return _is_first() and bool(getattr(bar.fp, "isatty", bool)())


def _is_first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _display(bar: Any, msg: str | None = None, pos: int | None = None) -> bool:
    """Draw the bar, or print it as a line: the first one, and one every SECONDS; the last is `_close`'s."""
    if _draws(bar):
        return bool(_frame(bar, msg, pos))
    now, before = time.monotonic(), bar.__dict__.get("last_line")
    if before is None or now - before >= SECONDS:
        bar.last_line = now
        if bar.total is None or bar.n < bar.total:
            _print(bar)
    return True


def _close(bar: Any) -> None:
    """End the bar; as lines, with its last one where there was a first."""
    if getattr(bar, "disable", True):
        return
    if _draws(bar):
        _end(bar)
        return
    bar.disable = True
    bar._decr_instances(bar)
    if "last_line" in bar.__dict__:
        # As tqdm does: the mean rate of all, not the last one.
        bar._ema_dt = lambda: None
        _print(bar)


def _clear(bar: Any, nolock: bool = False) -> None:
    """Take the bar off a terminal; lines stay."""
    if not bar.disable and _draws(bar):
        _erase(bar, nolock)


def _moveto(bar: Any, n: int) -> None:
    """Move a terminal's cursor to another bar's line; lines have no place."""
    if _draws(bar):
        _move(bar, n)


def _print(bar: Any) -> None:
    if _is_first():
        bar.fp.write(f"{str(bar).strip()}\n")
        bar.fp.flush()
