"""Checkpoints to resume from, found from outside of a run."""

import pytest

from flytune.errors import TrainingError
from flytune.records import StoredFile
from flytune.storage import Storage
from flytune.training.checkpoints import find, paths
from flytune.training.checkpoints.ledger import Checkpoint, Ledger
from tests.support.plans import recipe_of

DATA, OTHER = "1" * 64, "2" * 64


def checkpoint(recipe, content, step, folder, is_complete=True):
    """Store a checkpoint of one small file; where it is not complete, a byte of the file is missing."""
    ledger = paths.ledger_of(recipe, paths.run_key(recipe, content))
    attempt = ledger.begin()
    checkpoint = Checkpoint(
        step=step, attempt=attempt, decisions="x", sharding="none", world_size=1, flytune="0"
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state").write_bytes(b"state")
    stored = ledger.put(checkpoint, folder / "state", "state")
    files = [stored if is_complete else StoredFile(file="state", size=stored.size + 1, sha256=stored.sha256)]
    ledger.storage.write(
        f"{checkpoint.folder}/manifest.json",
        checkpoint.model_copy(update={"files": files}).sealed().model_dump_json().encode(),
    )
    return f"{ledger.storage.address}/{checkpoint.folder}"


@pytest.fixture(params=["folder", "address"])
def recipe(request, tmp_path):
    place = str(tmp_path / "runs")
    if request.param == "address":
        place = f"{request.getfixturevalue('bucket')}/{tmp_path.name}/runs"
    return recipe_of(checkpoints={"folder": place, "save_steps": 1})


def test_the_newest_complete_checkpoint_is_found_without_the_data(recipe, tmp_path):
    assert find.newest(recipe) is None
    assert find.described(recipe) == "There is no complete checkpoint."
    checkpoint(recipe, DATA, 3, tmp_path / "new")
    there = checkpoint(recipe, DATA, 5, tmp_path / "new")
    checkpoint(recipe, DATA, 7, tmp_path / "new", is_complete=False)
    checkpoint(recipe, OTHER, 2, tmp_path / "new")
    checkpoint(recipe.model_copy(update={"description": "other decisions"}), DATA, 99, tmp_path / "new")
    assert str(find.newest(recipe)) == f"step 5, {there}"
    assert find.newest(recipe, OTHER).checkpoint.step == 2
    assert (
        find.described(recipe)
        == f"Newest complete checkpoint: step 5, {there}; the same recipe resumes from it."
    )
    assert find.required(recipe, DATA).checkpoint.step == 5


def test_a_missing_checkpoint_is_refused_and_the_others_are_listed(recipe, tmp_path):
    with pytest.raises(
        TrainingError, match="nothing to resume from; run finetune, which starts at step 0"
    ) as caught:
        find.required(recipe, DATA)
    assert f"recipe {recipe.name}: there is no complete checkpoint" in str(caught.value)
    checkpoint(recipe, DATA, 3, tmp_path / "new")
    with pytest.raises(
        TrainingError, match=f"there are {paths.run_key(recipe, DATA)}: of other decisions or other data"
    ):
        find.required(recipe, OTHER)


def test_runs_of_one_name_share_their_checkpoints(tmp_path):
    settings = {"folder": str(tmp_path / "runs"), "save_steps": 1, "name": "nightly"}
    recipe = recipe_of(checkpoints=settings)
    checkpoint(recipe, DATA, 4, tmp_path / "new")
    assert find.newest(recipe).checkpoint.step == find.newest(recipe, OTHER).checkpoint.step == 4


def test_a_storage_that_cannot_be_read_is_reported(tmp_path):
    assert "(checkpoints.save_steps is not set): the next run starts at step 0" in find.described(recipe_of())
    away = recipe_of(checkpoints={"folder": "nosuch://x", "save_steps": 1})
    assert "It is unknown whether there is a checkpoint: checkpoints.folder: nosuch://x" in find.described(
        away
    )


def test_a_manifest_that_names_a_folder_is_a_fault_and_links_nothing(tmp_path):
    folder = tmp_path / "ledger" / "3-0001-abcdef"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights.bin").write_bytes(b"keep")
    listed = StoredFile(file="model", size=4, sha256="0" * 64)
    fields = {"decisions": "x", "sharding": "none", "world_size": 1, "flytune": "0", "files": [listed]}
    Checkpoint(step=3, attempt="0001-abcdef", **fields).sealed().write(folder / "manifest.json")
    ledger = Ledger(Storage(str(tmp_path / "ledger")), limit=1)
    (found,) = ledger.checkpoints()
    ledger.link(found, tmp_path / "linked")
    assert "model" in ledger.fault(found)
    assert not (tmp_path / "linked" / "model").exists()
