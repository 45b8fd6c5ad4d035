"""The task that runs a frozen model before training."""

from types import SimpleNamespace

import pytest

from flytune import patches
from flytune.recipe import Recipe
from flytune.stages.orchestrator import Folder
from flytune.stages.reference import reference_log_probs
from flytune.training import reference
from flytune.training.teacher import Teacher
from tests.support.tiny import tiny_recipe


@pytest.mark.parametrize("in_pod", [True, False])
def test_a_teacher_is_fetched_in_a_pod_that_otherwise_loads_nothing_from_the_hub(
    in_pod, tmp_path, monkeypatch
):
    from huggingface_hub import constants

    seen = []
    monkeypatch.setattr(Teacher, "compute", lambda *_: seen.append(constants.HF_HUB_OFFLINE) or [])
    monkeypatch.setattr(reference.data, "read_manifest", lambda _: SimpleNamespace(content_sha256="0"))
    objective = {"name": "distill", "teacher_model_name_or_path": str(tmp_path)}
    recipe = Recipe.model_validate(tiny_recipe(tmp_path, tmp_path, {"objective": objective}))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "manifest.json").touch()
    orchestrator = SimpleNamespace(is_local=lambda: not in_pod, new_folder=lambda: tmp_path / "out")
    with patches.huggingface_hub.OFFLINE.replaced(True):
        reference_log_probs(
            orchestrator, SimpleNamespace(recipe=recipe), Folder.here(tmp_path / "rows"), None
        )
        assert constants.HF_HUB_OFFLINE
    assert seen == [not in_pod]
