"""The process without leftovers of training: how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import waiting
from tests.support.paths import ROOT

CALL = """
import sys
from flytune.models import clean_process
from tests.support.process_kills import note_and_wait
if sys.argv[2] == "spawned":
    clean_process.note_training()
else:
    clean_process.fork()
clean_process.run(note_and_wait, sys.argv[1])
"""


@pytest.mark.parametrize("how", ["forked", "spawned"])
def test_it_ends_with_the_process_that_has_started_it(how, tmp_path):
    note = tmp_path / "process"
    with subprocess.Popen([sys.executable, "-c", CALL, str(note), how], cwd=ROOT) as process:
        waiting.until(note.exists)
        process.terminate()
    child = Path("/proc", note.read_text())
    waiting.until(lambda: not child.exists(), "the process ends")
