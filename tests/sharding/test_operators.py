"""Marks that torch leaves in the folders of operators that it compiles."""

import subprocess
import sys

from flytune.sharding import operators


def test_the_mark_of_a_process_that_was_killed_is_removed_and_that_of_a_living_one_stays(tmp_path):
    mark = tmp_path / "lock"
    holds = f"import os, sys; os.open({str(mark)!r}, os.O_CREAT | os.O_EXCL)"
    holds += "; print('held', flush=True); sys.stdin.read()"
    compiling = subprocess.Popen(
        [sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with compiling:
        assert compiling.stdout.readline() == "held\n"
        operators.remove_abandoned(mark)
        assert mark.exists()
        compiling.kill()
    operators.remove_abandoned(mark)
    assert not mark.exists()
