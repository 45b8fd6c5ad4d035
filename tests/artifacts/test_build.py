import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flytune.artifacts import build, fetch, publish
from flytune.errors import ExportError, StorageError
from flytune.evaluation import score
from flytune.recipe import Recipe
from flytune.records import Manifest, Metrics, Plan, TrainingResult
from flytune.records.contents import verify
from flytune.report import model_card
from tests.support.full_disk import files_of_at_most
from tests.support.paths import ROOT
from tests.support.reports import metrics as made_up
from tests.support.stages import copy_tree, plan_for, recipe_for, write_dataset, write_trained
from tests.support.tiny import tiny_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tiny_base(tmp_path_factory.mktemp("base"))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    return folder


@pytest.fixture(scope="module")
def dataset(base, tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("dataset"), base)


@pytest.fixture(scope="module")
def recipe(base):
    return recipe_for(base, "lora", description="Adds numbers.", **{"data.path": "s3://bucket/pairs.jsonl"})


@pytest.fixture(scope="module")
def whole(recipe, dataset, tmp_path_factory):
    """A trained folder; tests that harm it take a copy."""
    return write_trained(tmp_path_factory.mktemp("trained"), recipe, dataset, steps=2)


@pytest.fixture
def trained(whole, tmp_path):
    return copy_tree(whole, tmp_path / "trained")


def store(recipe, dataset, trained, out) -> Path:
    return build.store(recipe, plan_for(recipe), dataset, trained, made_up(), out)


@pytest.fixture(scope="module")
def stored(recipe, dataset, whole, tmp_path_factory):
    return store(recipe, dataset, whole, tmp_path_factory.mktemp("artifact"))


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_holds_what_is_needed_and_nothing_else(stored, recipe):
    exported = {
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "export.json",
        "gate/probe.safetensors",
    }
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    records = {
        "artifact.json",
        "comparison.json",
        "manifest.json",
        "metrics.json",
        "plan.json",
        "steps.jsonl",
        "training.json",
    }
    assert names(stored) == exported | tokenizer | records | {"README.md", "recipe.yaml", "report.html"}


def test_everything_reads_back(stored, recipe):
    assert Recipe.from_yaml(stored / "recipe.yaml") == recipe
    assert Metrics.read(stored / "metrics.json") == made_up()
    assert Plan.read(stored / "plan.json") == plan_for(recipe)
    assert Manifest.read(stored / "manifest.json").max_length == 128
    assert TrainingResult.read(stored / "training.json").world_size == 2


def test_contents_name_every_file_with_its_hash(stored):
    import hashlib

    contents = build.Contents.read(stored / "artifact.json").files
    assert {item.file for item in contents} == names(stored) - {"artifact.json"}
    for item in contents:
        data = (stored / item.file).read_bytes()
        assert (item.size, item.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_weights_are_linked_and_inputs_stay_as_they_were(recipe, dataset, trained, tmp_path):
    before = {name: (trained / name).read_bytes() for name in names(trained)}
    out = store(recipe, dataset, trained, tmp_path / "out")
    assert {name: (trained / name).read_bytes() for name in names(trained)} == before
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    assert os.path.samefile(trained / "adapter" / weights, out / weights)
    assert not os.path.samefile(trained / "adapter" / config, out / config)


def test_never_stores_into_a_used_folder(recipe, dataset, trained, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="out: not empty; an artifact is stored into a new folder"):
        store(recipe, dataset, trained, tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("adapter/training_args.bin", "a pickle; weights are stored as safetensors alone"),
        ("adapter/adapter_model.pt", "a pickle"),
        ("adapter/extra.pkl", "a pickle"),
        ("optimizer.safetensors", "training state, which is not part of a model"),
        ("checkpoint-12/model.safetensors", "training state, which"),
        ("adapter/trainer_state.json", "training state, which"),
        ("adapter/.cache/x.json", "a cache"),
        ("adapter/__pycache__/x.json", "a cache"),
    ],
)
def test_refuses_what_is_no_model(file, reason, recipe, dataset, trained, tmp_path):
    (trained / file).parent.mkdir(exist_ok=True)
    (trained / file).write_bytes(b"x")
    with pytest.raises(ExportError, match=f"^{re.escape(file)}: {reason}.*nothing was stored"):
        store(recipe, dataset, trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refuses_empty_and_cut_files(recipe, dataset, trained, tmp_path):
    weights = trained / "adapter" / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1000])
    with pytest.raises(
        ExportError,
        match=rf"adapter_model.safetensors: truncated .* {len(data):,} bytes, it has {len(data) - 1000:,}",
    ):
        store(recipe, dataset, trained, tmp_path / "out")
    weights.write_bytes(b"no safetensors at all")
    with pytest.raises(ExportError, match=r"adapter_model.safetensors: truncated or damaged"):
        store(recipe, dataset, trained, tmp_path / "out")
    weights.write_bytes(data)
    (trained / "adapter" / "adapter_config.json").write_bytes(b"")
    with pytest.raises(ExportError, match=r"^adapter/adapter_config.json: empty; nothing was stored"):
        store(recipe, dataset, trained, tmp_path / "out")


def test_refuses_a_folder_without_weights_or_with_two(recipe, dataset, trained, tmp_path):
    copy_tree(trained / "adapter", trained / "model")
    with pytest.raises(ExportError, match="has both model/ and adapter/; nothing was stored"):
        store(recipe, dataset, trained, tmp_path / "out")
    for folder in ("model", "adapter"):
        (trained / folder / "adapter_model.safetensors").unlink()
    with pytest.raises(
        ExportError, match=r"has neither model/ nor adapter/ with \*.safetensors; nothing was stored"
    ):
        store(recipe, dataset, trained, tmp_path / "out")


def test_refuses_a_shard_that_is_missing(recipe, dataset, trained, tmp_path):
    index = {"weight_map": {"a": "adapter_model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (trained / "adapter" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ExportError, match=r"adapter/model-00002-of-00002.safetensors: listed in .*index.json but missing"
    ):
        store(recipe, dataset, trained, tmp_path / "out")


def test_refuses_stages_that_did_not_finish(recipe, dataset, trained, tmp_path):
    (trained / "training.json").unlink()
    with pytest.raises(ExportError, match=r"training.json: missing, so its folder is incomplete"):
        store(recipe, dataset, trained, tmp_path / "out")
    (trained / "training.json").write_text("{}")
    with pytest.raises(
        ExportError, match=r"training.json: not a TrainingResult \(8 mistakes: steps: missing; "
    ):
        store(recipe, dataset, trained, tmp_path / "out")


def test_a_lost_log_does_not_lose_the_model(recipe, dataset, trained, tmp_path):
    (trained / "steps.jsonl").unlink()
    assert "steps.jsonl" not in names(store(recipe, dataset, trained, tmp_path / "out"))


def test_rows_set_aside_are_listed(recipe, dataset, trained, tmp_path):
    prepared = copy_tree(dataset, tmp_path / "dataset")
    (prepared / "bad_rows.jsonl").write_text('{"file": "a.jsonl", "line": 1, "reason": "not JSON"}\n')
    stored = store(recipe, prepared, trained, tmp_path / "out")
    assert (stored / "bad_rows.jsonl").read_bytes() == (prepared / "bad_rows.jsonl").read_bytes()
    assert "bad_rows.jsonl" in (stored / "artifact.json").read_text()


def published_at(recipe: Recipe, address: Path) -> Recipe:
    return recipe.model_copy(update={"publish": recipe.publish.model_copy(update={"address": str(address)})})


def front_matter(stored: Path) -> dict:
    return yaml.safe_load((stored / "README.md").read_text().split("---")[1])


def test_card_front_matter(stored, recipe, dataset, whole, tmp_path):
    matter = front_matter(stored)
    assert matter["license"] == "apache-2.0"
    assert matter["library_name"] == "peft"
    # A folder is no id that the hub could link to.
    assert "base_model" not in matter
    hub = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name_or_path": "owner/base"})})
    matter = front_matter(store(hub, dataset, whole, tmp_path / "hub"))
    assert (matter["base_model"], matter["base_model_relation"]) == ("owner/base", "adapter")
    assert "license" not in matter


def test_card_text(stored):
    text = (stored / "README.md").read_text()
    for shown in (
        "Adds numbers.",
        "39.6",
        "21.3 (19.9 to 22.9)",
        "−0.620 (−0.660 to −0.580)",
        "32 for training, 12 held out",
    ):
        assert shown in text
    assert "flytune run recipe.yaml" in text
    assert "{{" not in text
    assert "\n\n\n" not in text


def test_no_temporary_path_is_told(stored, base, dataset, whole):
    for page in ("README.md", "report.html"):
        text = (stored / page).read_text().replace(str(base), "BASE")
        assert str(stored) not in text
        assert str(dataset) not in text
        assert str(whole) not in text


CARDS = """
import os, sys
for folder in sys.argv[1:]:
    os.chdir(folder)
    exec(open("card.py").read(), {"__name__": "__main__"})
"""


@pytest.fixture(scope="module")
def cards(base, dataset, tmp_path_factory):
    """Return an artifact's metrics and the output of its card's code, by method; all codes run in one new
    process."""
    metrics, folders = {}, []
    for method in ("full", "lora", "qlora"):
        folder = tmp_path_factory.mktemp(method)
        recipe = recipe_for(base, method, **{"evaluation.sample_answers": 0, "evaluation.max_samples": 10})
        trained = write_trained(folder / "trained", recipe, dataset)
        metrics[method] = score.score(recipe, trained, dataset)
        out = build.store(recipe, plan_for(recipe), dataset, trained, metrics[method], folder / "out")
        blocks = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), flags=re.DOTALL)
        assert len(blocks) == 2
        (out / "dataset").symlink_to(dataset)
        (out / "card.py").write_text("\n".join(blocks))
        folders.append(out)
    done = subprocess.run(
        [sys.executable, "-c", CARDS, *folders], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"perplexity (\S+)", done.stdout)
    return {method: (metrics[method], float(found)) for method, found in zip(metrics, printed, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_code_of_the_card_gives_the_figure_of_the_report(method, cards):
    metrics, printed = cards[method]
    # Forgetting prepare_model_for_kbit_training moves it by 2e-4; other batches by 2e-6.
    assert printed == pytest.approx(metrics.tuned.perplexity, rel=3e-5)
    assert abs(printed - metrics.base.perplexity) > 0.05 * metrics.base.perplexity


def test_publish_to_a_folder_and_again_and_where_it_was_cut_off(stored, tmp_path):
    address = str(tmp_path / "models")
    assert publish.publish(stored, address, "tiny-1") == f"{address}/tiny-1"
    assert names(tmp_path / "models" / "tiny-1") == names(stored)
    before = {name: (tmp_path / "models" / "tiny-1" / name).stat().st_mtime_ns for name in names(stored)}
    # Again, and after it was cut off: files that are there are not written again.
    for lost in ((), ("artifact.json", "README.md")):
        for name in lost:
            (tmp_path / "models" / "tiny-1" / name).unlink()
        publish.publish(stored, address, "tiny-1")
        after = {name: (tmp_path / "models" / "tiny-1" / name).stat().st_mtime_ns for name in names(stored)}
        assert {name for name in after if after[name] != before[name]} == set(lost)


def test_publish_goes_on_within_a_file_that_was_cut_off(stored, tmp_path, monkeypatch):
    from fsspec.implementations.local import LocalFileSystem

    put_file = LocalFileSystem.put_file

    def cut(self, source, target, **more):
        if source.endswith("adapter_model.safetensors"):
            Path(target).write_bytes(Path(source).read_bytes()[:100])
            raise OSError(5, "Input/output error")
        put_file(self, source, target, **more)

    with monkeypatch.context() as broken, pytest.raises(ExportError, match="cannot be written to: OSError"):
        broken.setattr(LocalFileSystem, "put_file", cut)
        publish.publish(stored, str(tmp_path), "tiny")
    assert not (tmp_path / "tiny").exists(), "no half model is left"
    # A process that is killed deletes nothing.
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / ".plan.json.0a1b2c3d").write_bytes(b"half")
    publish.publish(stored, str(tmp_path), "tiny")
    (tmp_path / "tiny" / ".plan.json.0a1b2c3d").unlink()
    assert names(tmp_path / "tiny") == names(stored)
    weights = "adapter_model.safetensors"
    assert (tmp_path / "tiny" / weights).read_bytes() == (stored / weights).read_bytes()


@pytest.mark.parametrize("file", ["artifact.json", "plan.json", "notes.txt"])
def test_publish_overwrites_nothing(file, stored, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / file).write_text("mine")
    with pytest.raises(
        ExportError, match=r"tiny: holds .*nothing is overwritten: remove it, or change the recipe's name"
    ):
        publish.publish(stored, str(tmp_path), "tiny")
    assert names(tmp_path / "tiny") == {file}
    assert (tmp_path / "tiny" / file).read_text() == "mine"


def test_publish_to_s3(bucket, stored, tmp_path):
    import s3fs

    for _ in range(2):
        assert publish.publish(stored, f"{bucket}/deep/", "tiny") == "s3://models/deep/tiny"
    found = s3fs.S3FileSystem().find("models/deep/tiny")
    assert {path.removeprefix("models/deep/tiny/") for path in found} == names(stored)
    other = copy_tree(stored, tmp_path / "other")
    contents = build.Contents.read(stored / "artifact.json")
    contents.model_copy(update={"identity": "0" * 64}).write(other / "artifact.json")
    with pytest.raises(
        ExportError, match="s3://models/deep/tiny: holds another artifact; nothing is overwritten"
    ):
        publish.publish(other, f"{bucket}/deep", "tiny")
    with pytest.raises(
        ExportError, match=r"publish.address: s3://gone: tiny cannot be written to: .*bucket does not exist"
    ):
        publish.publish(stored, "s3://gone", "tiny")


def test_publish_to_an_address_that_is_none(stored):
    with pytest.raises(
        ExportError,
        match=r"publish.address: nosuch://bucket: cannot be written to: ValueError: Protocol not known",
    ):
        publish.publish(stored, "nosuch://bucket", "tiny")


def test_publish_what_is_not_whole(tmp_path):
    with pytest.raises(ExportError, match=r"no artifact.json: there is no artifact, or an incomplete one"):
        publish.publish(tmp_path, str(tmp_path / "out"), "tiny")


def test_the_licence_of_a_base_at_an_address_is_carried_over():
    import fsspec

    fsspec.filesystem("memory").pipe_file("/models/accepted/README.md", b"---\nlicense: llama3\n---\n# x\n")
    assert model_card._license("memory://models/accepted") == {"license": "llama3"}
    assert model_card._license("memory://models/none") == {}


def test_a_broken_guard_is_in_report_and_card_and_nothing_is_published(
    dataset, trained, recipe, tmp_path, caplog
):
    published = published_at(recipe, tmp_path / "models")
    out = build.store(
        published,
        plan_for(published),
        dataset,
        trained,
        made_up(),
        tmp_path / "out",
        broken=["arc_easy fell"],
    )
    assert "arc_easy fell" in (out / "report.html").read_text(encoding="utf-8")
    assert "arc_easy fell" in (out / "README.md").read_text(encoding="utf-8")
    assert publish.attempt(out, published, ["arc_easy fell"], lambda: "s3://raw/x") == ""
    assert "stored, but not published: arc_easy fell" in caplog.text
    assert not (tmp_path / "models").exists()


def test_a_full_disk_fails_the_run_and_leaves_nothing(stored, recipe, tmp_path):
    published = published_at(recipe, tmp_path / "models")
    with (
        pytest.raises(
            ExportError,
            match=r"not published: .*File too large.*; make room there.* is stored, at s3://raw/x: ",
        ),
        files_of_at_most(20_000),
    ):
        publish.attempt(stored, published, [], lambda: "s3://raw/x")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_download_to_a_full_disk_leaves_nothing(stored, tmp_path):
    import fsspec

    fsspec.filesystem("memory").put(f"{stored}/", "/full/tiny/", recursive=True)
    said = r"out: cannot be written: File too large; nothing is left there: make room"
    with pytest.raises(StorageError, match=said), files_of_at_most(20_000):
        fetch.fetch("memory://full/tiny", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_equal_run_is_published_once_and_another_decision_beside_it(recipe, dataset, whole, tmp_path):
    other = shutil.copytree(whole, tmp_path / "again")
    training = TrainingResult.read(other / "training.json")
    training.model_copy(update={"seconds": training.seconds + 1}).write(other / "training.json")
    elsewhere = published_at(recipe, Path("/other"))
    named = recipe.model_copy(update={"description": "another purpose"})
    made = [
        store(one, dataset, trained, tmp_path / str(number))
        for number, (one, trained) in enumerate([(recipe, whole), (elsewhere, other), (named, whole)])
    ]
    found = [publish.published_name(one, recipe) for one in made]
    assert found[0] == found[1] != found[2]
    address = str(tmp_path / "models")
    first = publish.publish(made[0], address, found[0])
    content = Path(first, "artifact.json").read_bytes()
    assert content != (made[1] / "artifact.json").read_bytes(), "times differ"
    assert publish.publish(made[1], address, found[1]) == first
    assert Path(first, "artifact.json").read_bytes() == content
    # A publication that was cut off is completed by an equal run.
    Path(first, "artifact.json").rename(Path(first, "artifact.partial.json"))
    publish.publish(made[1], address, found[1])
    assert names(Path(first)) == names(made[1])
    verify(Path(first))


def test_an_artifact_without_an_identity_is_completed_by_an_equal_publication_at_the_same_time(
    recipe, tmp_path
):
    release = ROOT / "tests" / "support" / "releases" / "0.1.0" / "artifact"
    name = publish.published_name(release, recipe)
    there = tmp_path / "models" / name
    there.mkdir(parents=True)
    # As another process leaves it between two of its files.
    shutil.copyfile(release / "artifact.json", there / "artifact.partial.json")
    shutil.copyfile(release / "recipe.yaml", there / "recipe.yaml")
    assert publish.publish(release, str(tmp_path / "models"), name) == str(there)
    assert names(there) == names(release)
    verify(there)


def test_a_folder_of_this_machine_is_not_fetched(tmp_path):
    for address, said in (
        (tmp_path, "a folder of this machine already"),
        (tmp_path / "none", "no such folder"),
    ):
        with pytest.raises(ExportError, match=said):
            fetch.fetch(str(address), tmp_path / "out")
