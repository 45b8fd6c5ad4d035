"""Artifacts on the Hugging Face Hub: huggingface_hub's own client against a hub on this machine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flytune.artifacts import build, fetch
from flytune.artifacts.publish import check, hub_errors
from flytune.artifacts.publish import publish as publish_folder
from flytune.errors import ExportError, RecipeError
from flytune.recipe import Recipe
from flytune.recipe.sections import Publish
from flytune.storage import Storage
from tests.support import mock_hub
from tests.support.mock_hub import ADDRESS, REPOSITORY, Refusal
from tests.support.paths import ROOT
from tests.support.reports import metrics as made_up
from tests.support.stages import copy_tree, plan_for, recipe_for, seal, write_trained

# How huggingface_hub hands a file to httpx.
pytestmark = pytest.mark.filterwarnings("ignore:Use .content=<...>. to upload raw bytes:DeprecationWarning")


def artifact_of(method, base, dataset, folder, steps=2, **changes):
    recipe = recipe_for(base, method, **{"publish.address": ADDRESS, **changes})
    trained = write_trained(folder / "trained", recipe, dataset, steps=steps)
    return build.store(recipe, plan_for(recipe), dataset, trained, made_up(), folder / "artifact")


@pytest.fixture(scope="module")
def adapter(base, dataset, tmp_path_factory):
    return artifact_of("lora", base, dataset, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def model(base, dataset, tmp_path_factory):
    return artifact_of("full", base, dataset, tmp_path_factory.mktemp("model"))


def publish(stored, name="sums-1", address=ADDRESS):
    return publish_folder(stored, address, name)


def refused(stored, address=ADDRESS):
    with pytest.raises(ExportError) as caught:
        publish(stored, address=address)
    assert "hf_" not in str(caught.value).replace("HF_TOKEN", "")
    return str(caught.value).removeprefix(f"publish.address: {address}: ")


def test_a_run_is_a_commit_and_a_tag_and_its_artifact_json_lists_it_as_it_lies_there(hub, adapter):
    assert publish(adapter) == "hf://ada/sums@sums-1"
    repository = hub.repositories[REPOSITORY]
    assert repository.private
    assert repository.tags == {"sums-1": repository.branches["main"]}
    assert repository.titles == ["initial commit", "sums-1"]
    files = repository.files()
    assert files.keys() == {file.file for file in build.Contents.read(adapter / "artifact.json").files} | {
        "artifact.json",
        ".gitattributes",
    }
    assert files["adapter_model.safetensors"] == (adapter / "adapter_model.safetensors").read_bytes()
    assert files["plan.json"] == (adapter / "plan.json").read_bytes()
    # The card is another one there.
    listed = {file["file"]: file["sha256"] for file in json.loads(files["artifact.json"])["files"]}
    assert listed == {
        name: mock_hub.hashlib.sha256(content).hexdigest()
        for name, content in files.items()
        if name not in (".gitattributes", "artifact.json")
    }


def test_weights_that_are_elsewhere_are_uploaded_from_there_one_at_a_time(hub, model, tmp_path):
    publish(model, "here")
    small = copy_tree(model, tmp_path / "small")
    (small / "model.safetensors").unlink()
    repository = hub.repositories[REPOSITORY]
    expected = repository.files()
    publish_folder(small, ADDRESS, "elsewhere", Storage(model))
    assert repository.files("elsewhere").keys() == expected.keys()
    assert repository.files("elsewhere")["model.safetensors"] == expected["model.safetensors"]
    assert (
        json.loads(repository.files("elsewhere")["artifact.json"]).keys()
        == json.loads(expected["artifact.json"]).keys()
    )


def test_again_makes_no_commit(hub, adapter):
    publish(adapter)
    asked = hub.asked.copy()
    publish(adapter)
    assert hub.asked - asked == {"create": 1, "refs": 1}
    # Cut off between the commit and its tag.
    repository = hub.repositories[REPOSITORY]
    repository.tags.clear()
    publish(adapter)
    assert len(repository.commits) == 2
    assert repository.tags == {"sums-1": repository.branches["main"]}


def test_the_next_run_takes_main_and_each_keeps_its_tag(hub, adapter, model):
    publish(adapter)
    repository = hub.repositories[REPOSITORY]
    repository.commits[repository.branches["main"]]["examples/mine.txt"] = b"added by a person"
    publish(model, "sums-2")
    files = repository.files()
    assert "config.json" in files
    assert "model.safetensors" in files
    assert not [name for name in files if name.startswith("adapter_")]
    assert files["examples/mine.txt"] == b"added by a person"
    assert "adapter_model.safetensors" in repository.files("sums-1")
    assert repository.files("sums-2") == files


def test_a_broken_upload_goes_on(hub, base, dataset, tmp_path):
    """Four large files, and a storage that refuses after the first: the next try uploads the other three."""
    import torch
    from safetensors.torch import save_file

    stored = artifact_of("full", base, dataset, tmp_path)
    for number in (2, 3):
        save_file({"x": torch.full((4,), float(number))}, stored / f"extra-{number}.safetensors")
    seal(stored)

    def broken(route):
        if route == "put" and hub.asked["put"] > 1:
            raise Refusal(403, "Request has expired")

    hub.broken = broken
    assert refused(stored).startswith("cannot be published: RuntimeError: Error while uploading '")
    assert len(hub.objects) == 1
    assert list(hub.repositories[REPOSITORY].files()) == [".gitattributes"]
    hub.broken, hub.asked["put"] = lambda route: None, 0
    publish(stored)
    assert hub.asked["put"] == 3
    assert {
        "gate/probe.safetensors",
        "model.safetensors",
        "extra-2.safetensors",
        "extra-3.safetensors",
    } <= hub.repositories[REPOSITORY].files().keys()


def test_a_commit_in_between_and_a_hub_that_is_away_for_a_moment(hub, adapter):
    seen = []

    def broken(route):
        if route == "commit" and len(seen) < 2:
            seen.append(route)
            if len(seen) == 1:
                raise Refusal(503, "try again")
            repository = hub.repositories[REPOSITORY]
            repository.branches["main"] = repository.add(repository.files() | {"LICENSE": b"mine"}, "by hand")

    hub.broken = broken
    publish(adapter)
    assert hub.asked["commit"] == 3
    assert hub.repositories[REPOSITORY].titles == ["initial commit", "by hand", "sums-1"]
    assert hub.repositories[REPOSITORY].files("sums-1")["LICENSE"] == b"mine"


def test_an_existing_repository_stays_as_public_as_it_is(hub, adapter):
    hub.repositories[REPOSITORY] = mock_hub.Repository(private=False)
    publish(adapter)
    assert not hub.repositories[REPOSITORY].private


def test_public_where_the_recipe_says_so(hub, base, dataset, tmp_path):
    publish(artifact_of("lora", base, dataset, tmp_path, **{"publish.private": False}))
    assert not hub.repositories[REPOSITORY].private


def test_anothers_model_is_left_as_it_is(hub, adapter):
    repository = hub.repositories[REPOSITORY] = mock_hub.Repository(private=True)
    repository.files().update(
        {"config.json": b"{}", "model.safetensors": b"", "README.md": b"", "LICENSE.txt": b""}
    )
    assert refused(adapter) == (
        "main has config.json, model.safetensors, which Flytune did not publish; nothing was changed: give a "
        "repository that does not exist yet, an empty one, or one that Flytune has published to"
    )
    assert hub.asked["put"] == hub.asked["commit"] == 0


NO_TOKEN = (
    "set HF_TOKEN to one with write access (on a cluster: secrets.hub in cluster.yaml, for every_save "
    "secrets.tracking too), or run `hf auth login`"
)
NOT_ADAS = (
    "bob is neither the token's account nor one of its organizations; it may write below: ada, lovelace"
)


@pytest.mark.parametrize(
    ("token", "address", "message"),
    [
        ("", ADDRESS, f"there is no token: {NO_TOKEN}"),
        (
            "hf_nobody",
            ADDRESS,
            f"the hub does not know the token (revoked, expired or cut short?): {NO_TOKEN}",
        ),
        ("hf_ada_reads", ADDRESS, f"the token of ada may not write there; {NO_TOKEN}"),
        ("hf_ada_writes", "hf://bob/sums", NOT_ADAS),
        ("hf_ada_writes", "hf://bob/public", NOT_ADAS),
    ],
)
def test_refusals(token, address, message, hub, adapter, monkeypatch):
    hub.repositories["bob/public"] = mock_hub.Repository(private=False)
    monkeypatch.setenv("HF_TOKEN", token)
    assert refused(adapter, address) == message
    assert hub.asked["put"] == hub.asked["commit"] == 0


def test_no_network(hub, adapter, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    again = "; run it again when it can: uploaded files are not sent again"
    assert (
        refused(adapter)
        == f"the hub cannot be reached (no network from here, or HF_ENDPOINT is wrong){again}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused(adapter) == f"the hub cannot be reached (HF_HUB_OFFLINE is set){again}"


def test_a_hub_that_repeats_the_token_does_not_get_it_told(hub, adapter):
    def broken(route):
        if route == "batch":
            raise Refusal(422, "no to hf_ada_writes")

    hub.broken = broken
    assert "no to ***" in refused(adapter)


@pytest.mark.parametrize(
    "address", ["hf://sums", "hf://datasets/ada/sums", "hf://datasets/ada", "hf://ada/sums/deep", "hf://"]
)
def test_addresses_that_are_none(address, base):
    with pytest.raises(ExportError, match="not a model repository of the hub: write hf://owner/name"):
        hub_errors.repository(address)
    with pytest.raises(ExportError, match=rf"^{address}: not a model repository of the hub") as error:
        fetch.local_folder(address)
    assert error.value.__cause__ is None
    with pytest.raises(
        RecipeError,
        match=f"publish: address: {address} is not a model repository of the hub; write hf://owner/",
    ):
        recipe_for(base, "lora", **{"publish.address": address})


def test_every_save_is_for_the_hub(base):
    with pytest.raises(
        RecipeError, match="publish: every_save publishes only to the hub; give address: hf://owner/name"
    ):
        recipe_for(base, "lora", **{"publish.every_save": True, "publish.address": "s3://bucket"})
    assert Publish(address=ADDRESS, every_save=True).every_save


def test_the_card(hub, base, dataset, tmp_path):
    from huggingface_hub import ModelCard

    stored = artifact_of("lora", base, dataset, tmp_path)
    recipe = Recipe.from_yaml(stored / "recipe.yaml").model_dump(exclude_defaults=True)
    recipe["model"]["name_or_path"], recipe["data"] = "meta/tiny", {"dataset_name": "ada/pairs"}
    (stored / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    seal(stored)
    hub.repositories["meta/tiny"] = mock_hub.Repository(private=False)
    hub.repositories["meta/tiny"].card = {
        "license": "other",
        "license_name": "tiny-1",
        "license_link": "https://x",
        "tags": [],
    }
    publish(stored)
    text = hub.repositories[REPOSITORY].files()["README.md"].decode()
    read = ModelCard(text).data
    expected = {
        "base_model": "meta/tiny",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "datasets": ["ada/pairs"],
    }
    expected |= {"license": "other", "license_name": "tiny-1", "license_link": "https://x"}
    assert {key: read.get(key) for key in expected} == expected
    figures = {result.metric_type: (result.metric_value, result.dataset_type) for result in read.eval_results}
    assert figures == {"perplexity": (pytest.approx(21.327557), "ada/pairs"), "loss": (3.06, "ada/pairs")}
    assert 'PeftModel.from_pretrained(model, "ada/sums", revision="sums-1")' in text
    assert "hf download ada/sums --revision sums-1 --local-dir ./tiny\n" in text
    assert "License: tiny-1, that of the base model." in text
    assert "\n\n\n" not in text


LOAD = """
import os, re, sys, torch
from flytune.models import loading
loading.import_libraries()
for folder, text, out in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    os.chdir(folder)
    card, = re.findall(r"## Use it.*?```python\\n(.*?)```", open(text).read(), flags=re.DOTALL)
    exec(card)
    torch.save(model(**tokenizer("Add 2 and 3.", return_tensors="pt")).logits, out)
"""


@pytest.mark.slow
def test_downloaded_by_another_process_they_answer_the_same(hub, adapter, model, tmp_path):
    """Run the code of both cards: the one on the hub, which names its tag, and the one in the artifact's
    folder."""
    import torch

    asked, answers = [], []
    for stored, name in ((adapter, "lora"), (model, "full")):
        publish(stored, name)
        published = tmp_path / f"{name}.md"
        published.write_bytes(hub.repositories[REPOSITORY].files(name)["README.md"])
        assert "ada/sums" in published.read_text()
        answers.append([tmp_path / f"{name}-{place}.pt" for place in ("hub", "folder")])
        asked += [tmp_path, published, answers[-1][0], stored, stored / "README.md", answers[-1][1]]
    environment = mock_hub.environment(hub, str(tmp_path / "home"))
    command = [sys.executable, "-W", "ignore", "-c", LOAD, *map(str, asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for pair in answers:
        assert torch.equal(*map(torch.load, pair))
    assert not torch.equal(torch.load(answers[0][0]), torch.load(answers[1][0]))
    assert hub.asked["resolve"]


@pytest.mark.slow
def test_what_the_page_says_works(hub, adapter, model, tmp_path):
    """docs/publish.md's Python and its command, with this test's names in place of the page's."""
    publish(adapter)
    publish(model, "sums-2")
    page = (ROOT / "docs" / "publish.md").read_text(encoding="utf-8")
    for name, own in {"owner/name": REPOSITORY, "NAME-HASH": "sums-2", "OUT": str(tmp_path / "out")}.items():
        page = page.replace(name, own)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"^```\n(flytune .*)\n```", page, re.MULTILINE)
    environment = mock_hub.environment(hub, str(tmp_path / "home")) | {"PYTHONPATH": str(ROOT)}
    for start in (
        ["-c", f"from transformers import AutoModelForCausalLM\n{code}"],
        ["-m", "flytune.cli", *command.split()[1:]],
    ):
        done = subprocess.run(
            [sys.executable, *start], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
    out = tmp_path / "out"
    listed = [file["file"] for file in json.loads((out / "artifact.json").read_text())["files"]]
    assert listed == [file.file for file in build.Contents.read(model / "artifact.json").files]
    assert all((out / name).is_file() for name in listed)
    assert (out / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_nothing_is_written_outside_of_what_is_fetched(hub, adapter, tmp_path):
    publish(adapter)
    repository = hub.repositories[REPOSITORY]
    files = repository.commits[repository.branches["main"]]
    contents = json.loads(files["artifact.json"])
    next(file for file in contents["files"] if file["file"] == "recipe.yaml")["file"] = "../../recipe.yaml"
    files["artifact.json"] = json.dumps(contents).encode()
    with pytest.raises(ExportError, match=r"the name '\.\./\.\./recipe\.yaml' leads out of its folder"):
        fetch.fetch(ADDRESS, tmp_path / "deep" / "er" / "out")
    assert not list(tmp_path.rglob("recipe.yaml"))


def test_a_token_that_the_hub_does_not_know_is_refused_before_training(hub, monkeypatch):
    recipe = recipe_for(Path("models/base"), "full", **{"publish.address": ADDRESS})
    check(recipe)
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    with pytest.raises(ExportError, match="publish.address: hf://ada/sums"):
        check(recipe)


def test_an_address_that_cannot_be_written_is_refused_by_the_plan(base, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    recipe = recipe_for(base, "full", **{"publish.address": str(tmp_path / "file/models")})
    with pytest.raises(ExportError, match=r"publish.address: .*/file is not a folder; give another address"):
        check(recipe)
    check(recipe_for(base, "full", **{"publish.address": str(tmp_path / "new/models")}))
    assert not (tmp_path / "new").exists()

    recipe = recipe_for(base, "full", **{"publish.address": "memory://models/of-a-plan"})
    check(recipe)
    assert Storage("memory://models/of-a-plan", "").files() == {}
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.pipe_file", no_permission)
    with pytest.raises(
        ExportError,
        match=r"publish.address: memory://models/of-a-plan: .*cannot be written to: PermissionError: no; it "
        r"refuses",
    ):
        check(recipe)


def no_permission(*_, **__):
    raise PermissionError("no")
