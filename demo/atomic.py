"""Files and folders that are written completely or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomically(out: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or a folder, which is moved to `out` if the block succeeds.

    If two processes make the same folder at once, the first one's is kept.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as parent:
        made = Path(parent, out.name)
        yield made
        if made.is_dir() and out.is_dir():
            shutil.rmtree(made)
        else:
            os.replace(made, out)
