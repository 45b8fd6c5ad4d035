"""Tests of the cache of base models on a volume, with a mock hub."""

import os
import subprocess
import sys
import threading

import pytest

from flytune import files
from flytune.errors import DataError, StorageError
from flytune.models import BaseRequest, base
from tests.support.model_hub import FIRST, NAME, SECOND, serving
from tests.support.paths import ROOT
from tests.support.tiny import tiny_base

FOLDER = f"models--{NAME.replace('/', '--')}"
FILL = """
import sys
from pathlib import Path
from flytune.models import BaseRequest, base
request = BaseRequest.model_validate_json(sys.argv[1])
print(base.fill_shared_cache(request, Path(sys.argv[2]), Path(sys.argv[3]), read_only=sys.argv[4] == "True"))
"""
LOAD = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from huggingface_hub import hf_hub_download
AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(sum(float(weight.double().sum()) for weight in model.parameters()))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("hub"))


def python(code, *arguments, **environment):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    seen = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=seen, cwd=ROOT
    )


def filled(hub, cache, scratch, commit=FIRST, read_only=False):
    """Start a process that fills the cache."""
    request = BaseRequest(name_or_path=NAME, commit=commit)
    return python(FILL, request.model_dump_json(), cache, scratch, read_only, **hub.environment())


def result(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    return out.strip()


@pytest.mark.slow
def test_concurrent_runs_fill_one_cache_and_pods_load_from_it_offline(folder, tmp_path):
    cache = tmp_path / "volume" / "hub"
    snapshot = cache / FOLDER / "snapshots" / FIRST
    with serving(folder) as hub:
        several = [filled(hub, cache, tmp_path / f"scratch{index}") for index in range(3)]
        assert {result(process) for process in several} == {str(snapshot)}
        assert result(filled(hub, cache, tmp_path / "read", SECOND, read_only=True)) == "None", (
            "another commit is not there"
        )
        before = len(hub.asked)
        assert result(filled(hub, cache, tmp_path / "again")) == str(snapshot)
        assert len(hub.asked) == before, "a complete model asks no hub"
    names = {path.name for path in snapshot.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert not [name for name in names if files.is_temporary(name)]
    assert (snapshot / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert not (cache / FOLDER / "refs").exists(), "each run has its own commit of main"
    hub_folder = tmp_path / "node"
    base.link_shared_cache(BaseRequest(name_or_path=NAME, commit=FIRST), cache, hub_folder)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub_folder)}
    assert result(python(LOAD, NAME, **offline)) == result(python(LOAD, folder, **offline))


@pytest.fixture
def model_hub(folder, monkeypatch):
    """Replace the download by copies from a folder; return the names of the files that were copied."""
    copied = []

    def copy_from_hub(wanted, put, scratch, has):
        scratch.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.iterdir()):
            name = f"{FOLDER}/snapshots/{wanted.commit}/{file.name}"
            if not has(name, file.stat().st_size):
                (scratch / "file").write_bytes(file.read_bytes())
                put(scratch / "file", name)
                copied.append(file.name)
        put(scratch / "file", f"{FOLDER}/refs/main")

    monkeypatch.setattr(base, "copy_from_hub", copy_from_hub)
    return copied


REQUEST = BaseRequest(name_or_path=NAME, commit=FIRST)


def test_only_files_that_lack_are_downloaded_and_none_is_replaced(folder, model_hub, tmp_path):
    snapshot = tmp_path / FOLDER / "snapshots" / FIRST
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((folder / "config.json").read_bytes())
    kept = (snapshot / "config.json").stat().st_ino
    assert base.fill_shared_cache(REQUEST, tmp_path, tmp_path / "scratch") == snapshot
    assert "config.json" not in model_hub
    assert "model.safetensors" in model_hub
    assert (snapshot / "config.json").stat().st_ino == kept
    model_hub.clear()
    with_code = REQUEST.model_copy(update={"trust_remote_code": True})
    assert base.fill_shared_cache(with_code, tmp_path, tmp_path / "scratch") == snapshot
    assert model_hub == [], "Python files would be looked for, and there are none"


def test_a_cache_that_cannot_be_written(model_hub, tmp_path):
    assert base.fill_shared_cache(REQUEST, tmp_path / "empty", tmp_path / "scratch", read_only=True) is None
    assert not (tmp_path / "empty").exists()
    assert model_hub == []
    (tmp_path / "file").touch()
    with pytest.raises(
        StorageError, match=r"model_cache: .*: cannot be written: .*writable for user or group 10001"
    ):
        base.fill_shared_cache(REQUEST, tmp_path / "file", tmp_path / "scratch")


def test_a_model_that_is_gone_says_what_to_do(tmp_path):
    with pytest.raises(
        DataError, match=r"model_cache: .*the stored base model is gone; run again with --overwrite-cache"
    ):
        base.link_shared_cache(REQUEST, tmp_path, tmp_path / "node")


def test_revisions_of_runs_are_their_own(model_hub, tmp_path):
    moved = REQUEST.model_copy(update={"commit": SECOND})
    for request, node in ((REQUEST, "one"), (moved, "two")):
        base.fill_shared_cache(request, tmp_path / "cache", tmp_path / "scratch")
        base.link_shared_cache(request, tmp_path / "cache", tmp_path / node)
        base.link_shared_cache(request, tmp_path / "cache", tmp_path / node)
    refs = [(tmp_path / node / FOLDER / "refs" / "main").read_text() for node in ("one", "two")]
    assert refs == [FIRST, SECOND]


def test_a_file_that_exists_is_kept_when_it_is_created_again(tmp_path, monkeypatch):
    def create(content):
        with files.created_atomically(tmp_path / "file") as temporary:
            temporary.write_text(content)

    threads = [threading.Thread(target=create, args=(str(index),)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = (tmp_path / "file").read_text()
    create("later")
    assert (tmp_path / "file").read_text() == first
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def no_links(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(files.os, "link", no_links)
    create("later")
    assert (tmp_path / "file").read_text() == first
    (tmp_path / "file").unlink()
    create("new")
    assert (tmp_path / "file").read_text() == "new"
