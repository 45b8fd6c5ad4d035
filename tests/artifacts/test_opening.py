"""Opening of artifacts that somebody else made or changed: nothing of one runs or is used before its
check."""

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from flytune import cli, serving
from flytune.adapters import combining, gguf, loading, merging
from flytune.artifacts import catalog, fetch, opening, publish, reproduction
from flytune.artifacts.opening import Consent
from flytune.console import error_lines, tables
from flytune.errors import ExportError, FlytuneError, RecipeError, TrainingError
from flytune.inference import batch
from flytune.models import initial_adapter
from flytune.recipe import Recipe
from flytune.records import Contents, contents
from flytune.records.contents import CONTENTS, verify
from flytune.registry import Decision, compare, history
from flytune.storage import Storage
from tests.support.paths import ROOT
from tests.support.recipes import content as recipe_content
from tests.support.spoiled import RELEASE, change, flip
from tests.support.stages import seal

STAND_IN = str(ROOT / "tests/support/stand_in_gguf_converter.py")
FILES = [file.file for file in Contents.read(RELEASE / "artifact" / CONTENTS).files]


SAID = {
    "sweep": "the folder of a sweep, and no artifact; `flytune fetch --point` fetches the artifact of a "
    "point",
    "answers": "the folder of answers, and no artifact",
    "dataset": "the folder of a data set, and no artifact",
}


@pytest.mark.parametrize(
    "command",
    ["merge FOLDER --out OUT", "gguf FOLDER --out OUT", "combine OUT FOLDER FOLDER", "reproduce FOLDER"],
)
@pytest.mark.parametrize("kind", SAID)
def test_another_listed_folder_is_no_artifact(kind, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "table.json").write_text("{}")
    contents.seal(folder, kind)
    words = {"FOLDER": str(folder), "OUT": str(tmp_path / "out")}
    assert cli.main([words.get(word, word) for word in command.split()]) == 1
    assert f"ExportError: {folder}: {SAID[kind]}\n" in capsys.readouterr().err


def change_recipe(artifact, old, new):
    """Write another text in the place of one into the recipe, and hashes that fit."""
    recipe = (artifact / "recipe.yaml").read_text()
    assert old in recipe
    (artifact / "recipe.yaml").write_text(recipe.replace(old, new))
    return seal(artifact)


def users(artifact, out):
    """Return every way in which an artifact is used, by its name."""
    recipe = Recipe.from_yaml(RELEASE / "artifact" / "recipe.yaml")
    return {
        "merge": lambda: merging.merge(artifact, out),
        "combine": lambda: combining.combine([artifact, artifact], out),
        "gguf": lambda: gguf.convert(artifact, out, converter=STAND_IN),
        "load": lambda: loading.load({"a": artifact}),
        "inference": lambda: batch.InferenceModel(artifact, {}),
        "registry": lambda: compare._compare(recipe, artifact, RELEASE / "dataset", artifact, "x"),
        "reproduce": lambda: reproduction.recipe_of(artifact),
        "compare": lambda: reproduction.compare(artifact, artifact),
        "publish": lambda: publish.publish(artifact, str(out), "name"),
        "fetch": lambda: fetch.fetch("memory://readers/artifact", out),
        "verify": lambda: serving.verify("http://127.0.0.1:1", artifact),
    }


USERS = list(users(Path(), Path()))


def put_at_address(artifact):
    import fsspec

    memory = fsspec.filesystem("memory")
    if memory.exists("/readers"):
        memory.rm("/readers", recursive=True)
    memory.put(str(artifact), "/readers/artifact", recursive=True)


def test_an_artifact_of_an_older_release_opens(artifact):
    opened = opening.open_artifact(artifact)
    assert opened.recipe.name == "release-lora"
    assert {file.file for file in opened.contents.files} == set(FILES)
    assert reproduction.recipe_of(artifact).name == "release-lora", "without consent, since it has no code"


@pytest.mark.parametrize("file", FILES)
def test_one_flipped_byte_of_each_file_is_found(artifact, file):
    flip(artifact / file)
    with pytest.raises(
        ExportError, match=f"artifact: {file}: its content is not what was written, by artifact.json"
    ):
        opening.open_artifact(artifact)


@pytest.mark.parametrize("user", USERS)
def test_no_use_of_an_artifact_takes_a_changed_lora_alpha(artifact, tmp_path, user):
    change(artifact / "adapter_config.json", lora_alpha=999)
    put_at_address(artifact)
    with pytest.raises(
        ExportError, match=r"adapter_config.json: (has [\d,]+ bytes|its content|not what artifact.json says)"
    ):
        users(artifact, tmp_path / "out")[user]()
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").rglob(CONTENTS))


def test_an_adapter_to_start_from_is_compared_too(artifact):
    put_at_address(artifact)
    method = {"name": "lora", "r": 2, "lora_alpha": 999, "lora_dropout": 0.0}
    for address in (str(artifact), "memory://readers/artifact"):
        change(artifact / "adapter_config.json", lora_alpha=999)
        put_at_address(artifact)
        recipe = Recipe.model_validate(recipe_content(method=method | {"adapter": address}))
        assert any("adapter_config.json: has " in problem for problem in initial_adapter.problems(recipe))
    flip(artifact / "adapter_model.safetensors", 1)
    with pytest.raises(ValueError, match="its content is not what was written"):
        initial_adapter._verified(Storage(artifact, "", error=TrainingError), "adapter_model.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "pytorch_model.bin",
        "modeling_x.py",
        "extra.json",
        "a/b.pt",
        "vocab.txt",
        "x.jinja",
    ],
)
def test_a_file_that_a_library_would_load_is_listed(artifact, name):
    (artifact / name).parent.mkdir(exist_ok=True)
    (artifact / name).write_bytes(b"x")
    with pytest.raises(ExportError, match="not one of the artifact's files, by artifact.json"):
        opening.open_artifact(artifact)


def test_other_files_may_lie_beside(artifact):
    for name in ("NOTICE", ".gitattributes", "picture.png", ".cache/huggingface/x.json", ".DS_Store"):
        (artifact / name).parent.mkdir(parents=True, exist_ok=True)
        (artifact / name).write_bytes(b"x")
    opening.open_artifact(artifact)


def test_a_missing_file_is_found(artifact):
    (artifact / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"tokenizer.json: listed in artifact.json but missing"):
        verify(artifact)


NO_ARTIFACT = {
    "empty": "",
    "HTML": "<!DOCTYPE html><html><body>404</body></html>",
    "cut": '{"files": [{"file": "a", "si',
    "a list": "[]",
    "null": "null",
    "another record": '{"step": 3, "loss": 1.0}',
    "files that are none": '{"files": 3}',
    "a file that is none": '{"files": [3]}',
    "a size that is text": '{"files": [{"file": "a", "size": "many", "sha256": "' + "0" * 64 + '"}]}',
    "a negative size": '{"files": [{"file": "a", "size": -1, "sha256": "' + "0" * 64 + '"}]}',
    "a size of 1e400": '{"files": [{"file": "a", "size": 1e400, "sha256": "' + "0" * 64 + '"}]}',
    "thousands of digits": '{"files": [{"file": "a", "size": '
    + "9" * 5000
    + ', "sha256": "'
    + "0" * 64
    + '"}]}',
    "no hash": '{"files": [{"file": "a", "size": 1, "sha256": ""}]}',
    "a key twice": '{"files": [], "files": []}',
    "a name twice": json.dumps({"files": [{"file": "a", "size": 1, "sha256": "0" * 64}] * 2}),
    "deep": "[" * 5000 + "]" * 5000,
    "another schema": '{"version": 9, "files": []}',
    "binary": "\x00\xff",
    "a surrogate": '{"files": [{"file": "\\ud800", "size": 1, "sha256": "' + "0" * 64 + '"}]}',
}


@pytest.mark.parametrize("content", NO_ARTIFACT.values(), ids=NO_ARTIFACT)
def test_what_is_no_artifact_is_said_to_be_none(artifact, tmp_path, content):
    (artifact / CONTENTS).write_bytes(content.encode("latin-1"))
    put_at_address(artifact)
    for name, use in users(artifact, tmp_path / "out").items():
        with pytest.raises(ExportError) as error:
            use()
        assert CONTENTS in str(error.value), name
        assert len(str(error.value)) < 1500, name


@pytest.mark.parametrize("content", NO_ARTIFACT.values(), ids=NO_ARTIFACT)
def test_one_bad_artifact_is_a_line_and_the_others_are_listed(artifact, tmp_path, content, capsys):
    store = tmp_path / "store"
    shutil.copytree(artifact, store / "good")
    shutil.copytree(artifact, store / "bad")
    for name in (CONTENTS, "metrics.json", "manifest.json", "adapter_config.json", "recipe.yaml"):
        (store / "bad" / name).write_bytes(content.encode("latin-1"))
        entries = {entry.name: entry for entry in catalog.list_artifacts(str(store))}
        assert entries["good"].problems == []
        assert entries["bad"].problems
    assert cli.main(["adapters", str(store)]) == 0
    assert "good" in capsys.readouterr().out


HOSTILE = """
from pathlib import Path
Path({!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "hostile"
class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture
def hostile(artifact, tmp_path):
    """An artifact of somebody else: its recipe asks for the base's code, which writes a file."""
    marker = tmp_path / "marker"
    for folder in (tmp_path / "base", artifact):
        (folder / "modeling_hostile.py").write_text(HOSTILE.format(str(marker)))
    names = {"AutoConfig": "modeling_hostile.Config", "AutoModelForCausalLM": "modeling_hostile.Model"}
    change(tmp_path / "base" / "config.json", auto_map=names, model_type="hostile")
    return change_recipe(
        artifact, "  name_or_path: base\n", "  name_or_path: base\n  trust_remote_code: true\n"
    ), marker


@pytest.mark.parametrize("user", [name for name in USERS if name not in ("compare", "publish", "fetch")])
def test_code_of_an_artifact_does_not_run_without_consent(hostile, tmp_path, user):
    artifact, marker = hostile
    with pytest.raises(
        ExportError,
        match="trust_remote_code: Python files of 'base' would run here.*give --trust-remote-code",
    ):
        users(artifact, tmp_path / "out")[user]()
    assert not marker.exists()


@pytest.mark.parametrize(
    "command", [["merge", "artifact", "--out", "out"], ["combine", "out", "artifact", "artifact"]]
)
def test_code_runs_with_consent_alone(hostile, command, capsys):
    _, marker = hostile
    assert cli.main(command) == 1
    assert "--trust-remote-code" in capsys.readouterr().err
    assert not marker.exists()
    cli.main([*command, "--trust-remote-code"])
    assert marker.exists(), "the marker of this test works"


def test_auto_map_alone_does_not_run_code_either(artifact, tmp_path):
    marker = tmp_path / "marker"
    (artifact / "tok.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    change(artifact / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.Tok", None]})
    seal(artifact)
    with pytest.raises(ExportError, match="tokenizer_config.json: names Python files of the model's own"):
        merging.merge(artifact, tmp_path / "out")
    assert not marker.exists()


def test_a_merged_folder_with_code_is_not_given_to_the_converter(tmp_path):
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "model.safetensors").touch()
    (merged / "config.json").write_text('{"auto_map": {"AutoConfig": "x.X"}}')
    with pytest.raises(ExportError, match="names Python files of the model's own"):
        gguf.convert(merged, tmp_path / "x.gguf", converter=STAND_IN)
    gguf.convert(merged, tmp_path / "x.gguf", converter=STAND_IN, consent=Consent(trust_remote_code=True))


def test_a_base_that_is_elsewhere_now_can_be_named_for_a_second_run(artifact, tmp_path):
    recipe = Recipe.from_yaml(artifact / "recipe.yaml")
    change_recipe(artifact, f"name_or_path: {recipe.model.name_or_path}", "name_or_path: ./gone")
    with pytest.raises(
        ExportError, match="the folder './gone', which is not on this machine .* --base FOLDER"
    ):
        reproduction.recipe_of(artifact)
    named = reproduction.recipe_of(artifact, base=str(tmp_path)).model
    assert (named.name_or_path, named.revision) == (str(tmp_path), None)


def test_tasks_of_an_artifacts_recipe_may_have_code_and_need_consent(artifact):
    change_recipe(artifact, "evaluation:\n", "evaluation:\n  tasks: [x]\n  include_path: s3://x/tasks\n")
    with pytest.raises(
        ExportError, match="evaluation.include_path: tasks in 's3://x/tasks' may have Python code"
    ):
        reproduction.recipe_of(artifact)
    assert reproduction.recipe_of(artifact, trust_remote_code=True).evaluation.include_path == "s3://x/tasks"


def test_rewards_of_an_artifacts_recipe_with_code_of_their_own_need_consent(artifact):
    code = "def own(completion, **columns):\\n    return 1"
    objective = f'objective:\n  name: grpo\n  rewards: [exact_answer, {{name: own, code: "{code}"}}]\n'
    change_recipe(artifact, "evaluation:\n", f"{objective}evaluation:\n")
    with pytest.raises(
        ExportError,
        match=r"objective.rewards with code of its own \(own\).*read it first.*--trust-remote-code",
    ):
        reproduction.recipe_of(artifact)
    assert reproduction.recipe_of(artifact, trust_remote_code=True).objective.own_code == ["own"]


@pytest.mark.parametrize(
    "place",
    [
        "python: /tmp/theirs",
        "address: https://theirs.example, folder: /mnt/weights",
        "folder: /home/somebody",
    ],
)
def test_programs_servers_and_folders_that_an_artifacts_recipe_names_need_consent(artifact, place):
    engine = f"{{name: vllm, {place}}}"
    objective = f"objective:\n  name: grpo\n  rewards: [exact_answer]\n  engine: {engine}\n"
    change_recipe(artifact, "evaluation:\n", f"{objective}evaluation:\n")
    with pytest.raises(
        ExportError, match=f"objective.engine.{place.partition(',')[0]}: .*--trust-remote-code"
    ):
        reproduction.recipe_of(artifact)
    assert reproduction.recipe_of(artifact, trust_remote_code=True).objective.own_places


BASES = {
    "s3://elsewhere/model": "--base ADDRESS",
    "http://elsewhere/model": "--base ADDRESS",
    "memory://readers/base": "--base ADDRESS",
    "/no/such/folder": "--base FOLDER",
    "../elsewhere": "--base FOLDER",
    "\\\\\\\\server\\\\share": "--base FOLDER",
}


@pytest.mark.parametrize(("name", "advice"), BASES.items())
def test_the_base_that_an_artifact_names_is_no_address_and_no_missing_folder(
    artifact, name, advice, tmp_path
):
    change_recipe(artifact, "name_or_path: base\n", f'name_or_path: "{name}"\n')
    for use in (
        lambda: merging.merge(artifact, tmp_path / "out"),
        lambda: combining.combine([artifact] * 2, tmp_path / "out"),
    ):
        with pytest.raises(ExportError, match=advice):
            use()
    base = str(tmp_path / "base")
    assert opening.open_artifact(artifact, Consent(base=base)).recipe.model.name_or_path == base


def test_a_base_with_a_password_is_refused_without_it(artifact, tmp_path):
    change_recipe(artifact, "name_or_path: base\n", "name_or_path: s3://key:hidden-word@b/x\n")
    with pytest.raises(RecipeError, match="an address with credentials") as error:
        merging.merge(artifact, tmp_path / "out")
    assert "hidden-word" not in str(error.value)


def test_the_base_of_the_person_is_used_and_shown(artifact, tmp_path, capsys):
    (tmp_path / "base").rename(tmp_path / "mine")
    assert cli.main(["merge", "artifact", "--out", "out"]) == 1
    capsys.readouterr()
    assert cli.main(["merge", "artifact", "--out", "out", "--base", "mine"]) == 0
    assert "base model: mine (--base)" in capsys.readouterr().err
    (tmp_path / "mine").rename(tmp_path / "base")
    assert cli.main(["merge", "artifact", "--out", "again"]) == 0
    assert "base model: base (named by the artifact)" in capsys.readouterr().err
    gguf.convert(tmp_path / "out", tmp_path / "x.gguf", converter=STAND_IN)
    flip(tmp_path / "out" / "model.safetensors", 1)
    with pytest.raises(ExportError, match="model.safetensors: its content is not what was written"):
        gguf.convert(tmp_path / "out", tmp_path / "y.gguf", converter=STAND_IN)


@pytest.mark.parametrize(
    "values",
    [{"r": 10**9}, {"rank_pattern": {"q_proj": 60_000}}, {"r": 60_000}, {"megatron_config": {"a": 1}}],
)
def test_an_adapter_that_would_allocate_or_import_is_refused_before(artifact, tmp_path, values):
    change(artifact / "adapter_config.json", **values)
    seal(artifact)
    for use in (
        lambda: merging.merge(artifact, tmp_path / "out"),
        lambda: combining.combine([artifact] * 2, tmp_path / "out"),
        lambda: loading.load({"a": artifact}),
    ):
        with pytest.raises(ExportError, match=r"rank|megatron_config"):
            use()


@pytest.mark.parametrize(
    "text", ["[/x]", "[bold]", "a\\", "[link=http://x]y[/link]", "\x1b[2Jx", ":warning:", "[red]x[/]"]
)
@pytest.mark.parametrize("columns", ["200", "40", "12"])
def test_a_reason_is_shown_as_it_is_and_breaks_no_listing(tmp_path, monkeypatch, capsys, text, columns):
    monkeypatch.setenv("COLUMNS", columns)
    fields = {
        "time": "2026-01-01T00:00:00Z",
        "outcome": "accepted",
        "method": "lora",
        "recipe": "r",
        "fingerprint": "f",
    }
    decision = Decision(artifact=f"{text}/a", reason=text, **fields)
    history.record(str(tmp_path), decision, expected=None)
    history.record(str(tmp_path), decision.model_copy(update={"artifact": "b"}), expected=f"{text}/a")
    assert cli.main(["accepted", str(tmp_path), "--rollback", "--reason", text.replace("\x1b", "")]) == 0
    assert cli.main(["accepted", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "\x1b[2J" not in said
    if columns == "200" and text.isprintable():
        assert f"accepted: {text}/a" in said


def test_an_error_is_printed_without_control_codes(capsys):
    error_lines.show(FlytuneError("a\x1b]0;x\x07b [/x] :warning:"))
    assert capsys.readouterr().err == "FlytuneError: a\\x1b]0;x\\x07b [/x] :warning:\n"
    assert isinstance(tables.console(), Console)
