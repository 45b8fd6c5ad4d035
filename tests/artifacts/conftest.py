"""Fixtures of several modules of this folder."""

import shutil
from pathlib import Path

import pytest

from tests.support.mock_hub import hub
from tests.support.spoiled import RELEASE

__all__ = ["hub"]


@pytest.fixture
def artifact(tmp_path, monkeypatch):
    """The adapter's artifact of release 0.1.0, whose base is the folder `base` beside it."""
    shutil.copytree(RELEASE / "base", tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(RELEASE / "artifact", tmp_path / "artifact"))
