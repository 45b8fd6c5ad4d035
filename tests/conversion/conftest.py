"""Fixtures of all modules of this folder."""

import pytest


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """Run in a folder without files that a converted one names, and without a hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
