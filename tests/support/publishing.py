"""Publication to a stand-in for the hub."""

import pytest

from tests.support import hub_stand_in

ADDRESS = "hf://ada/sums"
REPOSITORY = "ada/sums"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    with hub_stand_in.running() as server:
        for name, value in {"ENDPOINT": server.endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(constants, name, value)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", "hf_ada_writes")
        monkeypatch.delenv("HF_HUB_OFFLINE")
        yield server
