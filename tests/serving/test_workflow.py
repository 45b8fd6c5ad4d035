"""The workflow of docs/workflows.md that deploys, verifies and accepts."""

import re
import sys
from importlib import import_module

import pytest

from flytune.registry import history
from tests.support.model_server import ModelServer, started
from tests.support.paths import ROOT


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Provide the module of the page, with a kubectl that does nothing."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\nexit 0\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    text = (ROOT / "docs/workflows.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "verify(" in block]
    (tmp_path / "deploy_verify_accept.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("deploy_verify_accept")
    del sys.modules["deploy_verify_accept"]


def test_an_artifact_is_accepted_only_when_it_is_served(page, trained, tmp_path):
    accepted = str(tmp_path / "accepted")
    inputs = {"manifest": "served.yaml", "artifact": str(trained.folder), "accepted": accepted}
    with started(ModelServer("vllm", {"ours": trained.models["base"]}, trained.tokenizer)) as server:
        with pytest.raises(Exception, match="it answers as the base does"):
            page.deploy_verify_accept(server=server.address, **inputs)
        assert history.decisions_at(accepted) == []
        server.models = {"ours": trained.models["trained"]}
        page.deploy_verify_accept(server=server.address, **inputs)
    decision = history.current(history.decisions_at(accepted))
    assert decision.artifact == str(trained.folder)
    assert decision.reason.startswith(f"{server.address}: ours is ours")
