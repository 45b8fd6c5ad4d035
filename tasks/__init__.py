"""Flyte tasks: what runs where. Imports no task: a CPU pod imports the prepare task without torch."""

import os
import threading

from flytune import caches

# Here, for libraries read it as they are imported. Flyte sets the variable in every container.
if not caches.set_up(in_pod="FLYTE_INTERNAL_EXECUTION_ID" in os.environ):
    # Flyte's cache of local runs has no other place than HOME.
    os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")

from tasks.runtime import console, ending, errors

# Before `atexit`'s own, which stop the loops that the connections are closed on.
threading._register_atexit(ending.close_file_systems)  # type: ignore[attr-defined]
errors.install()
console.install()
