"""The folder in which results of runs on this machine stay."""

import itertools
import logging
import os
import shutil
from pathlib import Path

from flytune.files import link_or_copy, written_atomically

log = logging.getLogger(__name__)

RESULTS = "artifacts"
"""Folder of the working directory in which they stay."""
VARIABLE = "FLYTUNE_OUT"
"""Variable that names another folder; `flytune run --out` sets it."""


def keep(folder: Path, name: str) -> Path:
    """Move a folder with a result out of the temporary directory; return the folder in which it stays.

    It is `name` in the folder of results or, where that is there already, `name`-2 and so on: nothing is
    overwritten. Where it cannot be written, the result stays where it is, and a line says so.
    """
    results = Path(os.environ.get(VARIABLE) or RESULTS).absolute()
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    try:
        free = next(results / name for name in names if not os.path.lexists(results / name))
        with written_atomically(free) as temporary:
            shutil.copytree(
                folder,
                temporary,
                copy_function=lambda source, target: link_or_copy(Path(source), Path(target)),
            )
    except OSError as error:
        # Of a folder, shutil lists the files that could not be copied, each with its reason.
        problem = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
        log.warning(
            "%s: stays in a temporary folder of this machine, copy it to keep it: %s cannot be written: %s",
            folder,
            results,
            problem,
        )
        return folder
    shutil.rmtree(folder)
    return free
