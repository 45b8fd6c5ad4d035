"""Standard output that is full, closed or read by nobody: one error, and no exit code 0 for words that were
lost."""

import os
import subprocess
import sys

import pytest

from flytune import cli
from tests.support.paths import ROOT


def ended(words, streams, at_once):
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": at_once}
    line = f"exec {sys.executable} -m flytune.cli {words} {streams}"
    return subprocess.run(["bash", "-c", line], env=env, stderr=subprocess.PIPE, text=True, check=False)


# With and without the buffer that Python writes at its end.
@pytest.mark.parametrize("at_once", ["", "1"])
@pytest.mark.parametrize("words", ["-h", "plan -h", "schema"])
def test_help_that_cannot_be_written_is_one_error(words, at_once):
    done = ended(words, ">/dev/full", at_once)
    assert done.returncode == 1
    assert done.stderr.startswith("RecipeError: No space left on device: make room in ")
    assert len(done.stderr.splitlines()) == 1
    assert ended(words, ">/dev/full 2>&1", at_once).returncode == 1
    assert ended(words, ">/dev/null", at_once).returncode == 0


def test_a_ctrl_c_at_any_command_ends_it_without_a_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert cli.main(["schema"]) == 130
    assert capsys.readouterr().err == ""
