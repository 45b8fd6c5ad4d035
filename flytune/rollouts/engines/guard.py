"""Guard of vLLM's server, and its parent process.

It ends with the trainer, however that ends, and then ends all of the server's processes and deletes the
weights that were handed over. It is run as a file, and imports the standard library alone.

python guard.py TRAINER FOLDER COMMAND...
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from types import FrameType

_DEATH_SIGNAL, _ADOPTS_ORPHANS = 1, 36
"""Options of prctl (Linux's sys/prctl.h): PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER."""


def main(trainer: int, folder: str, command: list[str]) -> int:
    """Run the server until it ends, or the process `trainer` does; return its exit code."""
    signal.signal(signal.SIGTERM, _end)
    prctl = ctypes.CDLL(None).prctl
    prctl(_DEATH_SIGNAL, signal.SIGTERM)
    prctl(_ADOPTS_ORPHANS, 1)
    try:
        if os.getppid() != trainer:  # it ended before the signal was asked for
            return 1
        # This process has one thread, so that a function may run before the program is loaded.
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: prctl(_DEATH_SIGNAL, signal.SIGKILL),
        )
        try:
            code = server.wait()
            return code if code >= 0 else 128 - code
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        shutil.rmtree(folder, ignore_errors=True)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
