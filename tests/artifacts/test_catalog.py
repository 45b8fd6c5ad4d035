"""The catalog of a store, from small files that may be missing or damaged."""

import json
import os
import re
import shutil

import pytest

from flytune import cli
from flytune.artifacts import build, catalog, fetch, publish
from flytune.errors import ExportError
from flytune.records.contents import seal
from tests.support.spoiled import change
from tests.support.stages import write_dataset
from tests.support.store import stored
from tests.support.tiny import tiny_base


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    base = tiny_base(tmp_path_factory.mktemp("base"))
    store, dataset = tmp_path_factory.mktemp("store"), write_dataset(tmp_path_factory.mktemp("dataset"), base)
    return (
        base,
        stored(store, base, dataset, "adds", steps=1),
        stored(store, base, dataset, "whole", "full", steps=1),
    )


@pytest.fixture
def store(made, tmp_path):
    """Two artifacts, one a day older; no weights."""
    for age, folder in enumerate(made[1:]):
        copy = shutil.copytree(
            folder, tmp_path / "store" / folder.name, ignore=shutil.ignore_patterns("*.safetensors")
        )
        os.utime(copy / "artifact.json", (1_700_000_000 - 86400 * age,) * 2)
    return tmp_path / "store"


def test_lists_what_an_artifact_is_newest_first(made, store):
    adds, whole = catalog.list_artifacts(str(store))
    assert (adds.name, adds.kind, adds.method, adds.base) == ("adds", "adapter", "lora", str(made[0]))
    assert (whole.name, whole.kind, whole.method) == ("whole", "model", "full")
    assert (adds.data, adds.rows) == ("pairs.jsonl", 47)
    assert adds.data_sha256 == json.loads((store / "adds" / "manifest.json").read_text())["content_sha256"]
    assert adds.base_perplexity == pytest.approx(39.65, abs=0.01)
    assert adds.tuned_perplexity == pytest.approx(21.33, abs=0.01)
    assert adds.stored.isoformat() == "2023-11-14T22:13:20+00:00"
    assert adds.size == sum(
        stored.size for stored in build.Contents.read(store / "adds" / "artifact.json").files
    )
    assert adds.problems == whole.problems == []
    assert [entry.name for entry in catalog.list_artifacts(str(store / "whole"))] == ["whole"]
    assert catalog.list_artifacts(adds.address) == [adds]


def test_what_cannot_be_read_is_told_in_its_row(store, capsys, monkeypatch):
    (store / "adds" / "metrics.json").write_text("{")
    (store / "whole" / "manifest.json").unlink()
    (store / "whole" / "artifact.json").unlink()
    change(store / "adds" / "adapter_config.json", revision="0123456789abcdef")
    adds, whole = catalog.list_artifacts(str(store))
    assert adds.problems[0].startswith(
        "adapter_config.json: its content is not what was written, by artifact.json"
    )
    assert adds.problems[1].startswith("metrics.json: JSONError: ")
    assert adds.revision == "0123456789abcdef"
    assert whole.problems == ["artifact.json: not there", "manifest.json: not there"]
    assert whole.stored is whole.size is None
    (store / "whole" / "recipe.yaml").write_text("model: 3\nmethod: full\n")
    (store / "adds" / "manifest.json").write_text('{"source": 3, "rows": "many", "content_sha256": null}')
    adds, whole = catalog.list_artifacts(str(store))
    assert whole.problems[0] == "recipe.yaml: TypeError: 'int' object is not subscriptable"
    assert any(problem.startswith("rows: must be an integer") for problem in adds.problems)
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["adapters", str(store)]) == 0
    said = capsys.readouterr().out
    assert "artifact.json: not there" in said
    assert said.count("unknown") >= 4


def test_an_address_without_artifacts(tmp_path):
    for address in (tmp_path, tmp_path / "none"):
        with pytest.raises(
            ExportError, match="no artifact there, nor right below it: no recipe.yaml, no artifact.json"
        ):
            catalog.list_artifacts(str(address))
    with pytest.raises(ExportError, match="nope://x: cannot be read: ValueError: Protocol not known"):
        catalog.list_artifacts("nope://x")
    with pytest.raises(ExportError, match="nope://x: cannot be read"):
        fetch.local_folder("nope://x")


def test_folders_of_sweeps_and_answers_are_no_artifacts(store, tmp_path):
    for place in (store, tmp_path / "others"):
        for kind in ("sweep", "answers", "dataset"):
            (place / kind).mkdir(parents=True)
            (place / kind / "a.json").write_text("{}")
            seal(place / kind, kind)
    (store / "notes").mkdir()
    (store / "notes" / "a.txt").write_text("no list and no recipe")
    assert {entry.name for entry in catalog.list_artifacts(str(store))} == {"adds", "whole"}
    with pytest.raises(ExportError, match="only the folders of sweeps, answers or data sets"):
        catalog.list_artifacts(str(tmp_path / "others"))


def test_the_command_shows_a_row_for_each(made, store, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    assert cli.main(["adapters", str(store)]) == 0
    said = capsys.readouterr().out
    assert said.index("adds") < said.index("whole")
    assert "perplexity 39.65 to 21.33" in said
    assert re.search("47 rows, [0-9a-f]{12}", said)
    assert "2023-11-14 22:13" in said
    assert cli.main(["adapters", str(store), "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["adds", "whole"]
    assert cli.main(["adapters", str(store / "none")]) == 1


def test_pairs_are_not_listed_by_perplexity(store):
    old = json.loads((store / "adds" / "metrics.json").read_text())
    for name in ("figures", "scores"):
        old.pop(name, None)
    pairs = {"pairs": 8, "beta": 0.1, "accuracy": 0.75, "margin": 0.2, "base": 0.5, "tuned": 0.6}
    old["preference"] = pairs | {f"{name}_{end}": 0.5 for name in list(pairs)[2:] for end in ("low", "high")}
    (store / "adds" / "metrics.json").write_text(json.dumps(old))
    reward = old | {"preference": None, "reward": old["preference"]}
    (store / "whole" / "metrics.json").write_text(json.dumps(reward))
    for entry, first in zip(
        catalog.list_artifacts(str(store)), ("reward_margin", "reward_accuracy"), strict=True
    ):
        assert entry.figures[0].name == first
        assert entry.base_perplexity is entry.tuned_perplexity is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_bucket_is_listed_fetched_and_checked(made, bucket, tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for folder in made[1:]:
        publish.publish(folder, f"{bucket}/team", folder.name)
    entries = catalog.list_artifacts(f"{bucket}/team")
    assert {entry.address for entry in entries} == {f"{bucket}/team/adds", f"{bucket}/team/whole"}
    assert all(entry.stored is not None and entry.problems == [] for entry in entries)
    found = fetch.local_folder(f"{bucket}/team/adds")
    assert (found / "adapter_model.safetensors").read_bytes() == (
        made[1] / "adapter_model.safetensors"
    ).read_bytes()
    assert (found / "report.html").exists()
    assert fetch.local_folder(f"{bucket}/team/adds/") == found
    with pytest.raises(
        ExportError, match="none: no artifact.json: there is no artifact, or an incomplete one"
    ):
        fetch.local_folder(f"{bucket}/team/none")
    fsspec.filesystem("s3").pipe_file(f"{bucket}/team/whole/recipe.yaml", b"name: other\n")
    with pytest.raises(
        ExportError, match="whole/recipe.yaml: not what artifact.json says; publish the artifact again"
    ):
        fetch.local_folder(f"{bucket}/team/whole")


def test_a_fingerprint_names_artifacts_and_their_names(made):
    adds, whole = (folder / "artifact.json" for folder in made[1:])
    found = {
        catalog.fingerprint(files)
        for files in ({"a": adds}, {"b": adds}, {"a": whole}, {"a": adds, "b": whole})
    }
    assert len(found) == 4
    assert catalog.fingerprint({"b": whole, "a": adds}) in found
    with pytest.raises(ExportError, match="x: no artifact.json"):
        catalog.fingerprint({"x": adds.parent / "none"})
