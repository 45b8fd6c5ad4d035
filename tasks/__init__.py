"""Flyte tasks, with the resources and images of each stage. Imports no task: CPU pods import theirs without
torch."""

import atexit
import os
import threading
from pathlib import Path

from flytune import caches, process_setup
from flytune.errors import LaunchError

# Set here because libraries read these variables when they are imported. Flyte sets the variable in every
# container.
if not caches.set_up(in_pod="FLYTE_INTERNAL_EXECUTION_ID" in os.environ):
    # Flyte keeps its cache of local runs below HOME; it cannot be moved.
    os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")
try:
    process_setup.clear(in_pod="FLYTE_INTERNAL_EXECUTION_ID" in os.environ)
except LaunchError as _refused:
    raise SystemExit(
        f"{type(_refused).__name__}: {_refused}"
    ) from None  # pyflyte would show an import's frames
# torch's threads that wait would keep their cores busy: a step on a CPU takes three to five times as long
# with any other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from flytune.console import output
from tasks.runtime import console, errors, termination

process_setup.skip_at_exit()
atexit.register(termination.close_local_cache)
# Runs before the exit functions of `atexit`, which stop the loops that the connections are closed on.
threading._register_atexit(termination.close_file_systems)  # type: ignore[attr-defined]
termination.end_at_ctrl_c()
# A pod and pyflyte call nothing of the project before they import it. Any other process that does is left as
# it is.
if errors.is_pyflyte():
    errors.install()
    output.install()
if "FLYTE_INTERNAL_EXECUTION_ID" in os.environ or console.is_pod():
    console.install()
    output.install()
if "FLYTE_INTERNAL_EXECUTION_ID" in os.environ:
    # A recipe's relative paths are those of the code: where none is unpacked, the working directory is empty.
    os.chdir(Path(__file__).resolve().parent.parent)
