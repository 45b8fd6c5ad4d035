"""Results of local runs: where they stay, that none is overwritten, and what becomes of one that cannot be
moved."""

import errno

import pytest

from flytune.artifacts import kept


@pytest.fixture
def result(tmp_path, monkeypatch):
    """Return a new temporary folder with a result; the working directory is another folder."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv(kept.VARIABLE)

    def make(text):
        folder = tmp_path / "temporary" / "tiny"
        (folder / "gate").mkdir(parents=True)
        (folder / "gate" / "probe.json").write_text(text)
        return folder

    return make


def test_a_result_stays_in_the_working_directory_and_none_is_overwritten(result, tmp_path):
    texts = {"tiny-0a": "first", "tiny-0a-2": "second", "tiny-0a-3": "third"}
    for name, text in texts.items():
        folder = result(text)
        assert kept.keep(folder, "tiny-0a") == tmp_path / "work" / "artifacts" / name
        assert not folder.exists()
    assert {
        path.name: (path / "gate" / "probe.json").read_text()
        for path in (tmp_path / "work/artifacts").iterdir()
    } == texts


def test_the_variable_names_another_folder(result, tmp_path, monkeypatch):
    monkeypatch.setenv(kept.VARIABLE, "mine/models")
    assert kept.keep(result("x"), "tiny-0a") == tmp_path / "work" / "mine" / "models" / "tiny-0a"


def test_a_result_that_cannot_be_moved_is_not_lost(result, tmp_path, caplog):
    (tmp_path / "work" / "artifacts").write_text("a file")
    folder = result("x")
    assert kept.keep(folder, "tiny-0a") == folder
    assert (folder / "gate" / "probe.json").read_text() == "x"
    assert f"{folder}: stays in a temporary folder of this machine, copy it to keep it: " in caplog.text


def test_a_full_disk_is_said_once(result, tmp_path, caplog, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(kept, "link_or_copy", refuse)
    folder = result("x")
    (folder / "second").write_text("y")
    assert kept.keep(folder, "tiny-0a") == folder
    assert caplog.text.count("No space left on device") == 1
