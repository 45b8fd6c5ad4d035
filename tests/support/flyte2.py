"""Runs of Flyte 2 in its local mode, in this process and its worker."""

import atexit
import os

import flyte
import flyte.storage
import pytest

from flytune.stages.worker import Worker
from tests.support.pyflyte import finetuned

os.environ["FLYTE_DISABLE_TELEMETRY"] = "1"


def run2(task, **inputs):
    """Return what a task of the second face makes."""
    made = flyte.with_runcontext(mode="local").run(task, **inputs)
    return made.outputs()[0]


@pytest.fixture
def home2(tmp_path, monkeypatch):
    """Give the SDK's cache of local runs a home of its own."""
    from flyte._persistence import _db

    monkeypatch.setattr(_db, "DEFAULT_CACHE_DIR", str(tmp_path / "home2"))
    monkeypatch.setattr(_db.LocalDB, "_initialized", False)
    return tmp_path


def run1(recipe):
    """Return the address of the artifact that the first face makes of a recipe, in a process of its own
    without Flyte 2."""
    return FIRST.call(finetuned, recipe)


FIRST = Worker()
atexit.register(FIRST.end)
