"""Arguments of commands: nothing is overwritten, and absurd numbers and paths are refused before any work."""

import subprocess
import sys

import pytest

from flytune import __version__
from flytune.cli import main
from tests.support.chats import request, tokenizer_folder
from tests.support.full_disk import files_of_at_most


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe file in an empty working folder, whose data has two chats."""
    monkeypatch.chdir(tmp_path)
    folder = tokenizer_folder(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(20)))
    asked = request(folder, path=str(tmp_path / "rows.jsonl"))
    (tmp_path / "recipe.yaml").write_text(
        "name: r\n"
        f"model: {{name_or_path: {asked.model.name_or_path}}}\n"
        f"data: {{path: rows.jsonl}}\n"
        "method: full\n"
        "sharding: none\n"
        "training: {learning_rate: 1e-4, global_batch_size: 1}\n"
    )
    return tmp_path / "recipe.yaml"


def refused(arguments, capsys):
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr().err
    assert code == 1
    assert said.startswith(("RecipeError: ", "ExportError: "))
    return said


# In data (Python), in the tokenizer (Rust), and in the page itself.
@pytest.mark.parametrize("size", [300, 2000, 5000, 8000])
def test_xray_on_a_full_disk_ends_with_one_error_and_leaves_nothing(size, recipe, capsys):
    page = recipe.with_name("out") / "page.html"
    page.parent.mkdir()
    with files_of_at_most(size):
        assert main(["xray", str(recipe), "--out", str(page)]) == 1
    error = capsys.readouterr().err
    assert "File too large" in error
    assert "make room" in error
    assert error.count("Error: ") == 1
    assert list(page.parent.iterdir()) == []


def test_issue_21_line_8_xray_replaces_no_file_but_its_own_pages(recipe, capsys):
    before = recipe.read_bytes()
    said = refused(["xray", recipe, "--out", recipe], capsys)
    assert said.endswith(
        "exists already, and is not a page of xray; give another path, or --force to replace it\n"
    )
    assert recipe.read_bytes() == before
    page = recipe.with_name("page.html")
    assert main(["xray", str(recipe), "--out", str(page)]) == 0
    assert main(["xray", str(recipe), "--out", str(page), "--rows", "15"]) == 0
    page.write_text("<!DOCTYPE html><title>another page</title>")
    capsys.readouterr()
    refused(["xray", recipe, "--out", page], capsys)
    assert main(["xray", str(recipe), "--out", str(page), "--force"]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>\n")


@pytest.mark.parametrize(
    "command",
    [["merge", "x", "--out"], ["gguf", "x", "--out"], ["fetch", "x"], ["combine"], ["selftest", "--keep"]],
)
@pytest.mark.parametrize(
    "name", ["file", "full", "link", "dangling", "file/below", "x" * 300, "", "\udcff", "s3://b/x"]
)
def test_outputs_that_cannot_be_written_are_refused_first(command, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("keep")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("keep")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nowhere")
    said = refused([*command, name, *(["a", "b"] if command == ["combine"] else [])], capsys)
    assert "OUT " in said or "--out " in said or "--keep " in said
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "file").read_text() == "keep"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "r", "--samples", "0"],
        ["plan", "r", "--samples", "9" * 400],
        ["xray", "r", "--rows", "-1"],
        ["combine", "o", "a", "b", "--weights", "nan", "1"],
        ["combine", "o", "a", "b", "--rank", "0"],
        ["combine", "o", "a", "b", "--density", "inf"],
        ["combine", "o", "a", "b", "--seed", "-1"],
    ],
)
def test_absurd_numbers_are_refused(arguments, capsys):
    assert ": must be " in refused(arguments, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "arguments", "said"),
    [
        (
            "transformers",
            ["xray", "recipe.yaml"],
            "transformers: not installed: `pip install 'flytune[data]'` installs it",
        ),
        (
            "flytekit",
            ["fetch", "abcdefghij", "out"],
            "flytekit: not installed: `pip install 'flytune[flyte]'` installs it",
        ),
        (
            "flytekit",
            ["doctor", "--remote"],
            "flytekit: not installed: `pip install 'flytune[flyte]'` installs it",
        ),
        ("trl", ["selftest"], "trl: not installed: `pip install 'flytune[train]'` installs it"),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_what_installs_it(
    missing, arguments, said, recipe, tmp_path
):
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from flytune import cli\n"
        f"sys.exit(cli.main({arguments!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_word_that_is_no_command_or_option_gets_the_nearest_one(capsys):
    for arguments, said in (
        (["pln", "x"], "'pln': unknown; did you mean plan?"),
        (
            ["plan", "--shpae", "auto", "x.yaml"],
            "flytune plan: error: --shpae: unknown; did you mean --shape?",
        ),
        (["schema", "x"], "flytune schema: error: x: unknown"),
        (["--version"], f"flytune {__version__}"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert said in "".join(capsys.readouterr())
