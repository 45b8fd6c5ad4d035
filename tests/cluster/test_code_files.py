"""Files of a clone that both SDKs send: the product's code, whatever else is there; its size, and its
limit."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from flytune import patches
from flytune.cluster import code_files
from flytune.errors import FlytuneError
from tests.support.laptop import checkout
from tests.support.paths import ROOT

OWN = [
    "own/data.jsonl",
    "own/merged/model.safetensors",
    "artifacts/x/report.html",
    "recipes/mine/rows.jsonl",
    "notes.txt",
]


@pytest.fixture
def clone(tmp_path):
    """A checkout that git knows, with a person's own files, which it does not track."""
    folder = checkout(tmp_path / "clone")
    shutil.rmtree(folder / "own")
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    for name in OWN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("private")
    (folder / "flytune" / "linked.py").symlink_to(folder / OWN[0])
    return folder


def flytekit_sends(folder, monkeypatch, out):
    """Names in the archive that flytekit makes for `--copy all`."""
    from flytekit.constants import CopyFileDetection
    from flytekit.tools import script_mode
    from flytekit.tools.fast_registration import FastPackageOptions, fast_package

    monkeypatch.setattr(
        script_mode, "list_all_files", code_files.lister(patches.flytekit.CODE_FILES.original())
    )
    with tarfile.open(
        fast_package(folder, out, options=FastPackageOptions([], copy_style=CopyFileDetection.ALL))
    ) as archive:
        return set(archive.getnames())


def flyte2_sends(folder, monkeypatch, out):
    """Names in the bundle that Flyte 2's SDK makes for `--copy-style all`."""
    from flyte._code_bundle import _ignore, _packaging, _utils

    monkeypatch.setattr(_utils, "list_all_files", code_files.lister(patches.flyte.CODE_FILES.original()))
    ignores = (_ignore.StandardIgnore, _ignore.GitIgnore, _ignore.FlyteIgnore)
    names, _ = _packaging.list_files_to_bundle(Path(folder), True, *ignores, copy_style="all")
    return {str(Path(name).relative_to(folder)) for name in names}


@pytest.mark.parametrize("sends", [flytekit_sends, flyte2_sends])
@pytest.mark.parametrize("is_tracked", [True, False])
def test_the_code_is_sent_and_nothing_of_a_person_s(sends, is_tracked, clone, tmp_path, monkeypatch, capsys):
    if not is_tracked:
        subprocess.run(["git", "rm", "-rq", "--cached", "."], cwd=clone, check=True)
    sent = sends(clone, monkeypatch, tmp_path)
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    tops = ("flytune/", "tasks/", "workflows/", "flyte2/", "recipes/")
    wanted = {name for name in tracked if name.startswith(tops) and (ROOT / name).is_file()}
    assert wanted | {"shapes.yaml", "cluster.yaml"} <= sent
    assert {name.partition("/")[0] for name in sent} <= set(code_files.PLACES)
    assert sent.isdisjoint([*OWN, "flytune/linked.py"])
    assert f"code that is sent: {len(sent)} files, 3." in capsys.readouterr().out


def test_a_module_that_git_does_not_track_is_named(clone, capsys):
    (clone / "flytune" / "mine.py").write_text("")
    assert str(clone / "flytune" / "mine.py") not in code_files.lister(list)(clone, False)
    assert (
        "not sent, because git does not track it: flytune/linked.py, flytune/mine.py; `git add`"
        in capsys.readouterr().out
    )


def test_rows_that_git_tracks_among_the_code_are_not_sent_but_named(clone, capsys):
    (clone / "recipes" / "rows.jsonl").write_text("private")
    subprocess.run(["git", "add", "recipes/rows.jsonl"], cwd=clone, check=True)
    sent = code_files.lister(list)(clone, False)
    assert str(clone / "recipes" / "demo-qlora.yaml") in sent
    assert str(clone / "recipes" / "rows.jsonl") not in sent
    assert "no file of the product is like it: recipes/rows.jsonl\n" in capsys.readouterr().out


def test_what_is_too_large_for_code_is_refused_with_the_largest_files(clone):
    (clone / "recipes" / "rows.yaml").write_bytes(b"x" * 5_000_000)
    subprocess.run(["git", "add", "recipes"], cwd=clone, check=True)
    with pytest.raises(FlytuneError) as caught:
        code_files.lister(list)(clone, False)
    first, _, *largest = str(caught.value).splitlines()
    assert (
        "MB, more than the 5.0 MB that code may have; move data and models to a folder beside flytune/"
        in first
    )
    assert "recipes/rows.yaml: 5.0 MB" in str(caught.value)
    assert len(largest) == 4


def test_another_project_is_left_to_the_sdk(tmp_path):
    assert code_files.lister(lambda *given: [str(given[0])])(tmp_path, False) == [str(tmp_path)]


def test_the_patterns_are_the_tracked_files_and_images_have_the_same():
    tracked = subprocess.run(
        ["git", "ls-files", "--", *code_files.PLACES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    matched = {str(path.relative_to(ROOT)) for pattern in code_files.PATTERNS for path in ROOT.glob(pattern)}
    assert matched >= {name for name in tracked if (ROOT / name).is_file()}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    for_the_build = {"requirements*.lock", "pyproject.toml"}
    assert {line[1:] for line in lines if line.startswith("!")} == {*code_files.PATTERNS, *for_the_build}
