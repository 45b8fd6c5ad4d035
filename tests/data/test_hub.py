"""Data sets on a hub: a small server on this machine that answers as the Hugging Face hub does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flytune import data
from flytune.errors import DataError
from flytune.recipe import Data
from tests.support.chats import request, tokenizer_folder
from tests.support.data_hub import COMMIT

ASK = """
import sys
from pathlib import Path
from flytune import data
from flytune.errors import DataError
from flytune.recipe.recipe import DataRequest
from flytune.recipe.data import Data

request, out = DataRequest.model_validate_json(sys.argv[1]), Path(sys.argv[2])
pinned = Data(dataset_name="owner/pairs", revision=sys.argv[3])
print(data.fingerprint(request.data) == data.fingerprint(pinned))
print(data.prepare(request, out).rows)
def attempt(ask):
    try:
        print(ask()[:5])
    except DataError as error:
        print(error)

closed, none = {"dataset_name": "owner/closed"}, {"dataset_name": "owner/none"}
revision = {"revision": "gone"}
for changes in (closed, none, revision, {"dataset_split": "test"}, {"dataset_config": "en"}):
    asked = Data(**{"dataset_name": "owner/pairs", **changes})
    attempt(lambda: data.fingerprint(asked))
    attempt(lambda: data.prepare(request.model_copy(update={"data": asked}), out / str(changes)))
heldout = Data(dataset_name="owner/pairs", eval_split="validation")
made = data.prepare(request.model_copy(update={"data": heldout}), out / "own split")
print(made.train.samples, made.heldout.samples, [source.name for source in made.sources])
part = Data(dataset_name="owner/pairs", dataset_split="train[:10%]", heldout_fraction=0)
print(data.prepare(request.model_copy(update={"data": part}), out / "part").rows)
gone = heldout.model_copy(update={"eval_split": "gone"})
attempt(lambda: data.prepare(request.model_copy(update={"data": gone}), out / "gone"))
for name in ("owner/closed", "owner/none"):
    model = request.model.model_copy(update={"name_or_path": name})
    attempt(lambda: data.prepare(request.model_copy(update={"model": model}), out / name))
"""
CLOSED = "gated on the hub, and HF_TOKEN is not set; request access on its page, then set HF_TOKEN"


@pytest.mark.slow
def test_rows_and_refusals_of_a_hub(hub: str, tmp_path: Path) -> None:
    asked = request(tokenizer_folder(tmp_path / "tokenizer"), dataset_name="owner/pairs")
    settings = {
        "HF_ENDPOINT": hub,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    environment = {name: value for name, value in {**os.environ, **settings}.items() if name != "HF_TOKEN"}
    command = [sys.executable, "-c", ASK, asked.model_dump_json(), str(tmp_path / "out"), COMMIT]
    said = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=600
    ).stdout.splitlines()
    fingerprint = data.fingerprint(Data(dataset_name="owner/pairs", revision=COMMIT))[:5]
    assert said == [
        "True",
        "50",
        f"data.dataset_name: owner/closed: {CLOSED}",
        f"data.dataset_name: owner/closed[train]: {CLOSED}",
        "data.dataset_name: owner/none: no such data set on the hub; if it is private, set HF_TOKEN",
        "data.dataset_name: owner/none[train]: no such data set on the hub; if it is private, set HF_TOKEN",
        "data.dataset_name: owner/pairs: the data set has no such revision on the hub",
        "data.dataset_name: owner/pairs[train]: the data set has no such revision on the hub",
        fingerprint,
        "data.dataset_name: owner/pairs[test]: cannot be read: Bad split: test. Available splits: ['train', "
        "'validation']",
        fingerprint,
        "data.dataset_name: owner/pairs[train]: cannot be read: BuilderConfig 'en' not found. Available: "
        "['default']",
        "50 7 ['owner/pairs', 'owner/pairs[validation]']",
        "5",
        "data.dataset_name: owner/pairs[gone]: cannot be read: Bad split: gone. Available splits: ['train', "
        "'validation']",
        f"model.name_or_path: owner/closed: {CLOSED}",
        "model.name_or_path: owner/none: no such model on the hub; if it is private, set HF_TOKEN",
    ]


def test_no_hub_at_all(tmp_path: Path) -> None:
    offline = "not on this machine, and the hub cannot be reached (HF_HUB_OFFLINE is set)"
    with pytest.raises(DataError) as caught:
        data.fingerprint(Data(dataset_name="owner/pairs"))
    pin = "; or set data.revision, if the data set is in the cache of this machine"
    assert str(caught.value) == f"data.dataset_name: owner/pairs: {offline}{pin}"
    assert data.fingerprint(Data(dataset_name="owner/pairs", revision="v1")) != data.fingerprint(
        Data(dataset_name="owner/pairs", revision="v2")
    )
    asked = request(tokenizer_folder(tmp_path / "tokenizer"), dataset_name="owner/pairs")
    with pytest.raises(DataError) as caught:
        data.prepare(asked, tmp_path / "out")
    assert str(caught.value) == f"data.dataset_name: owner/pairs[train]: {offline}"


@pytest.mark.parametrize("name", ["./pairs.jsonl", "s3://bucket/pairs", "/data/pairs"])
def test_a_path_is_no_name(name: str) -> None:
    with pytest.raises(
        DataError, match="this names a data set on the hub; for a file, folder or address use data.path"
    ):
        data.fingerprint(Data(dataset_name=name))
