"""Local runs of workflows by `pyflyte run`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import fork_server
from tests.support.paths import ROOT


def pyflyte(recipe, folder, seen=None, forks=False):
    """Run a recipe with its own home and temporary directory.

    Args:
        seen: additional environment variables.
        forks: True for a program that begins with its libraries (fork_server.py).
    """
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return pyflyte_run(["workflows/finetune.py", "finetune", "--recipe", path], folder, seen, forks)


def pyflyte_run(arguments, folder, seen=None, forks=False):
    """Do the same with any arguments of `pyflyte run`."""
    (folder / "tmp").mkdir()
    environment = os.environ | {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), **(seen or {})}
    command = [Path(sys.executable).with_name("pyflyte"), "run", *arguments]
    if forks:
        return fork_server.run(command, ROOT, environment)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)


def finetuned(recipe):
    """Run a recipe in this process; return the address of its artifact."""
    from workflows.finetune import finetune

    return str(finetune(recipe=recipe).path)


@pytest.fixture
def local_cache(tmp_path, monkeypatch):
    from flytekit.core import local_cache

    monkeypatch.setattr(local_cache, "CACHE_LOCATION", str(tmp_path / "cache"))
    monkeypatch.setattr(local_cache.LocalTaskCache, "_initialized", False)
