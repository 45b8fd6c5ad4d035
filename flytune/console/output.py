"""Progress bars as lines if there is no terminal, and suppression of useless warnings.

This applies to every process that imports flytune: ranks, subprocesses of evaluation and of the harness, forked workers, pods
and the command line. The libraries (transformers, datasets, huggingface_hub) use tqdm's bars, as Flytune does.
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
    # transformers and PEFT, about each other's older names.
    (FutureWarning, ".*is deprecated and will be removed in v6"),
    # DeepSpeed about torch, and torch about itself.
    (FutureWarning, "`torch\\.distributed\\.[a-z_]*` is deprecated"),
    # bitsandbytes about its optimizers on a CPU, which has no memory to page out.
    (UserWarning, "Paged optimizers are not supported on CPU"),
]
"""Warnings of the pinned libraries about each other: category and message."""
_LOGGERS = {
    # bitsandbytes has no such kernel for a CPU, and computes without it.
    "bitsandbytes.backends.cpu.ops": logging.ERROR,
}
"""Loggers of the libraries, and the lowest level that is shown."""


def install() -> None:
    """Replace the display of this process's bars and suppress warnings; later calls do nothing."""
    if tqdm.display is _display:
        return
    tqdm.__init__ = _init
    tqdm.display, tqdm.close, tqdm.clear, tqdm.moveto = _display, _close, _clear, _moveto
    for category, message in _NOTICES:
        warnings.filterwarnings("ignore", message, category)
    for name, level in _LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    # Close bars that are still open: when they are deleted, this module may be gone.
    atexit.register(lambda: [bar.close() for bar in list(tqdm._instances)])


_tqdm_init, _tqdm_display, _tqdm_close, _tqdm_clear, _tqdm_moveto = (
    tqdm.__init__,
    tqdm.display,
    tqdm.close,
    tqdm.clear,
    tqdm.moveto,
)


@functools.wraps(_tqdm_init)
def _init(bar: Any, *arguments: Any, **settings: Any) -> None:
    """Create the bar. The hub's `disable=None` hides bars without a terminal; they are shown as lines instead."""
    if settings.get("disable", False) is None:
        settings["disable"] = False
    _tqdm_init(bar, *arguments, **settings)


def _draws(bar: Any) -> bool:
    """Return whether tqdm draws the bar: on a terminal, in the first rank of a node."""
    return _is_first() and bool(getattr(bar.fp, "isatty", bool)())


def _is_first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _display(bar: Any, msg: str | None = None, pos: int | None = None) -> bool:
    """Draw the bar, or print it as a line: at the start and every SECONDS; `_close` prints the last line."""
    if _draws(bar):
        return bool(_tqdm_display(bar, msg, pos))
    now, before = time.monotonic(), bar.__dict__.get("last_line")
    if before is None or now - before >= SECONDS:
        bar.last_line = now
        if bar.total is None or bar.n < bar.total:
            _print(bar)
    return True


def _close(bar: Any) -> None:
    """Close the bar; print its last line if its first was printed."""
    if getattr(bar, "disable", True):
        return
    if _draws(bar):
        _tqdm_close(bar)
        return
    bar.disable = True
    bar._decr_instances(bar)
    if "last_line" in bar.__dict__:
        # As in tqdm: the mean rate of the whole run, not the latest one.
        bar._ema_dt = lambda: None
        _print(bar)


def _clear(bar: Any, nolock: bool = False) -> None:
    """Remove the bar from a terminal; printed lines stay."""
    if not bar.disable and _draws(bar):
        _tqdm_clear(bar, nolock)


def _moveto(bar: Any, n: int) -> None:
    """Move a terminal's cursor to another bar's line; without a terminal, do nothing."""
    if _draws(bar):
        _tqdm_moveto(bar, n)


def _print(bar: Any) -> None:
    if _is_first():
        bar.fp.write(f"{str(bar).strip()}\n")
        bar.fp.flush()
