"""The stages on Flyte 2: the same table as tasks/ and workflows/ have for Flyte 1. See docs/flyte2.md."""

import importlib.metadata
import os

from flytune import caches, process_setup
from flytune.errors import LaunchError

VERSION = "2.12"
"""Minor version of the SDK: its internals change between minor versions."""

try:
    _installed = importlib.metadata.version("flyte")
except importlib.metadata.PackageNotFoundError:
    _installed = ""
if not _installed.startswith(f"{VERSION}."):
    raise ModuleNotFoundError(
        f"flyte2: it needs flyte {VERSION}, the SDK of Flyte 2, and found {_installed or 'none'}; "
        "install the extra flyte2: pip install -e '.[flyte2]' in the clone",
        name="flyte",
    )

IS_POD = "_U_RUN_BASE" in os.environ
"""True in a pod: Flyte 2 sets the variable in every container."""
# Before libraries are imported that read these variables.
caches.set_up(in_pod=IS_POD)
try:
    process_setup.clear(in_pod=IS_POD)
except LaunchError as _refused:
    raise SystemExit(f"{type(_refused).__name__}: {_refused}") from None
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
process_setup.skip_at_exit()
