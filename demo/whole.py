"""Files and folders that are there whole or not at all, whatever interrupts their making."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """Yields a path beside `out` at which to make a file or a folder; it becomes `out` if the block ends well.

    Of two processes that make the same folder at once, the first one's stays.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as made_in:
        made = Path(made_in, out.name)
        yield made
        if made.is_dir() and out.is_dir():
            shutil.rmtree(made)
        else:
            os.replace(made, out)
