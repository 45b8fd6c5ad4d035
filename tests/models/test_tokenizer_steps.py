"""Tokenizers of anybody whose steps make texts of any length, or name files elsewhere."""

import json
import shutil

import pytest

from flytune.errors import ExportError
from flytune.models import tokenizers
from tests.support.paths import ROOT

RELEASE = ROOT / "tests/support/releases/0.1.0/artifact"
_DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_WORDS = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 100}
_TOKENS = {
    "type": "TemplateProcessing",
    "special_tokens": {"x": {"id": "x", "ids": [1] * 200, "tokens": ["x"] * 200}},
}
_TOKENS |= {
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 100 + [{"Sequence": {"id": "A", "type_id": 0}}]
}
_TOKENS |= {"pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]}
HOSTILE = {
    "doubled": {"normalizer": {"type": "Sequence", "normalizers": [_DOUBLE] * 40}},
    "nested": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": [_WORDS] * 2}] * 8,
        }
    },
    "long": {"normalizer": {"type": "Prepend", "prepend": "a" * 20_000}},
    "decoded": {"decoder": {"type": "Sequence", "decoders": [_DOUBLE] * 40}},
    "tokens": {"post_processor": _TOKENS},
}


@pytest.fixture
def folder(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(RELEASE / name, tmp_path / name)
    return tmp_path


def change(file, values):
    file.write_text(json.dumps(json.loads(file.read_bytes()) | values))


@pytest.mark.parametrize("values", HOSTILE.values(), ids=HOSTILE)
def test_steps_that_make_texts_long_are_not_run(folder, values):
    change(folder / "tokenizer.json", values)
    with pytest.raises(
        ExportError,
        match=f"its tokenizer is not loaded .its {next(iter(values))} makes texts more than 1,000",
    ):
        tokenizers.load(folder)


def test_they_are_found_in_a_tokenizer_from_elsewhere_too(folder):
    from transformers import AutoTokenizer

    change(folder / "tokenizer.json", HOSTILE["doubled"])
    found = AutoTokenizer.from_pretrained(folder)
    with pytest.raises(ValueError, match="its normalizer makes texts more than 1,000 times as long"):
        tokenizers.try_out(found)


def test_usual_steps_are_used(folder):
    usual = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    usual += [
        {"type": "NFKC"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
        {"type": "Lowercase"},
    ]
    change(folder / "tokenizer.json", {"normalizer": {"type": "Sequence", "normalizers": usual}})
    assert tokenizers.problem_in_steps(folder) is None
    assert tokenizers.load(folder)("a b")["input_ids"]


@pytest.mark.parametrize(
    "name", ["../tokenizer.4.0.0.json", "/dev/tokenizer.4.0.0.json", "a/tokenizer.4.0.0.json"]
)
def test_no_file_elsewhere_is_the_tokenizer(folder, name):
    change(folder / "tokenizer_config.json", {"fast_tokenizer_files": [name]})
    with pytest.raises(
        ExportError, match=r"its tokenizer is not loaded .tokenizer_config.json names the file"
    ):
        tokenizers.load(folder)


@pytest.mark.parametrize("key", ["gguf_file", "vocab_file", "merges_file"])
def test_nor_is_one_read_that_the_configuration_names(folder, tmp_path_factory, key):
    other = tmp_path_factory.mktemp("other") / "x.gguf"
    other.write_bytes(b"GGUF")
    change(folder / "tokenizer_config.json", {key: str(other)})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=f"names a file elsewhere .{key}: "):
        tokenizers.load(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "merges.txt"]
)
def test_an_empty_file_is_not_read_because_those_of_the_kernel_block(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/proc/kmsg")
    with pytest.raises(ExportError, match=f"its tokenizer is not loaded .{name} is empty"):
        tokenizers.load(folder)


def test_a_file_of_its_authors_machine_is_no_obstacle(folder):
    change(
        folder / "tokenizer_config.json",
        {"tokenizer_file": "/home/nobody/.cache/tokenizer.json", "vocab_file": None},
    )
    assert tokenizers.load(folder)("a b")["input_ids"]


def test_a_base_models_tokenizer_is_looked_at_before_it_is_loaded(folder):
    from flytune.data.tokenizer import load_tokenizer
    from flytune.errors import DataError
    from flytune.recipe import Data, Model

    change(folder / "tokenizer.json", HOSTILE["doubled"])
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(
        DataError, match="model.name_or_path: .*: its tokenizer is not loaded: its normalizer makes texts"
    ):
        load_tokenizer(Model(name_or_path=str(folder)), Data(path="x.jsonl"))


@pytest.mark.parametrize(
    "values",
    [
        {"post_processor": {"type": "TemplateProcessing", "special_tokens": [1], "single": 5}},
        {"normalizer": {"type": "Replace", "pattern": {"String": 5}, "content": None}},
        {"decoder": 5},
    ],
)
def test_steps_of_no_known_form_are_one_error(folder, values):
    change(folder / "tokenizer.json", values)
    with pytest.raises(ExportError, match="its tokenizer cannot be read"):
        tokenizers.load(folder)
