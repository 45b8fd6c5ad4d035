"""GGUF files, with a stand-in for llama.cpp's converter: how it is found and called, and what is refused."""

import shutil

import pytest

from flytune.adapters import gguf
from flytune.cli import main
from flytune.errors import ExportError
from tests.support.full_disk import files_of_at_most
from tests.support.paths import ROOT
from tests.support.tiny import tiny_base

STAND_IN = ROOT / "tests/support/stand_in_gguf_converter.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(autouse=True)
def no_converter(monkeypatch, tmp_path):
    monkeypatch.delenv(gguf.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")


def test_the_converter_of_the_option_of_the_variable_and_on_path(model, tmp_path, monkeypatch, capsys):
    assert (
        main(
            [
                "gguf",
                str(model),
                "--out",
                str(tmp_path / "a.gguf"),
                "--converter",
                str(STAND_IN),
                "--outtype",
                "q8_0",
            ]
        )
        == 0
    )
    assert (tmp_path / "a.gguf").read_bytes() == b"GGUFq8_0"
    assert capsys.readouterr().out == f"{tmp_path / 'a.gguf'}\n"
    monkeypatch.setenv(gguf.VARIABLE, str(STAND_IN))
    gguf.convert(model, tmp_path / "b.gguf")
    monkeypatch.delenv(gguf.VARIABLE)
    (tmp_path / "bin").mkdir()
    shutil.copy(STAND_IN, tmp_path / "bin" / gguf.CONVERTER)
    (tmp_path / "bin" / gguf.CONVERTER).chmod(0o755)
    gguf.convert(model, tmp_path / "c.gguf", "f16")
    assert [(tmp_path / f"{name}.gguf").read_bytes() for name in "bc"] == [b"GGUFauto", b"GGUFf16"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf", "bin", "c.gguf"], (
        "nothing temporary stays"
    )


def test_without_a_converter_the_command_is_shown(model, tmp_path):
    said = (
        f"no convert_hf_to_gguf.py on PATH; .*or run there: python convert_hf_to_gguf.py {model} "
        f"--outfile {tmp_path}/x.gguf"
    )
    with pytest.raises(ExportError, match=said + " --outtype f16$"):
        gguf.convert(model, tmp_path / "x.gguf", "f16")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").touch()
    with pytest.raises(
        ExportError,
        match=f"run there: flytune merge {adapter} --out .*x-merged --dtype auto && python .*x-merged",
    ):
        gguf.convert(adapter, tmp_path / "x.gguf")
    with pytest.raises(ExportError, match="gone.py: no such file; install llama.cpp"):
        gguf.convert(model, tmp_path / "x.gguf", converter=str(tmp_path / "gone.py"))


def test_an_adapter_is_merged_first_and_not_rounded_for_a_file_of_32_bits(model, tmp_path, monkeypatch):
    adapter, dtypes = tmp_path / "adapter", []
    adapter.mkdir()
    (adapter / "adapter_config.json").touch()

    def merge(artifact, out, consent, dtype):
        dtypes.append(dtype)
        shutil.copytree(model, out)

    monkeypatch.setattr(gguf.merging, "merge", merge)
    gguf.convert(adapter, tmp_path / "x.gguf", converter=str(STAND_IN))
    gguf.convert(adapter, tmp_path / "y.gguf", "f32", converter=str(STAND_IN))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "x.gguf", "y.gguf"]
    assert dtypes == ["auto", "float32"]


def test_a_failure_leaves_no_file(model, tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    with pytest.raises(
        ExportError, match=r"exit code 1; it said:\nNotImplementedError: BPE pre-tokenizer was not recognized"
    ):
        gguf.convert(model, tmp_path / "x.gguf", converter=str(STAND_IN))
    monkeypatch.delenv("STAND_IN_FAILS")
    monkeypatch.setenv("STAND_IN_WRITES_NOTHING", "1")
    with pytest.raises(ExportError, match="it ended without an error, and wrote no GGUF file"):
        gguf.convert(model, tmp_path / "x.gguf", converter=str(STAND_IN))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_file(model, tmp_path, capsys):
    with files_of_at_most(2):
        assert (
            main(["gguf", str(model), "--out", str(tmp_path / "x.gguf"), "--converter", str(STAND_IN)]) == 1
        )
    error = capsys.readouterr().err
    assert "File too large" in error
    assert error.startswith("ExportError: ")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_model_and_an_existing_file_are_refused(model, tmp_path):
    with pytest.raises(ExportError, match=r"no config\.json and no adapter_config\.json"):
        gguf.convert(tmp_path, tmp_path / "x.gguf")
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ExportError, match="exists already; give a new file"):
        gguf.convert(model, tmp_path / "x.gguf")
