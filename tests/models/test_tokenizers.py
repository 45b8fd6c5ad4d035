"""The tokens are those of the base's tokenizer.json, whatever class of transformers is named beside it."""

import json

import pytest

from flytune import data
from flytune.data import load_tokenizer
from flytune.errors import DataError
from flytune.models import tokenizers, vocabulary
from flytune.recipe import Data, DataRequest, Model, Recipe
from flytune.selftest.tiny_model import CHATML, SENTENCES, SPECIAL_TOKENS
from tests.support.tiny import tiny_recipe, write_rows

TEXT = "Add 12345 and 7:\n\n\n  then it's DON'T"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_base(folder, named, split=CL100K, **config):
    """Write a tokenizer that splits by an expression, below the name of a class."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=470, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([*SENTENCES, TEXT, "q7z a q7z"] * 4, trainer)
    folder.mkdir(parents=True)
    bpe.save(str(folder / "tokenizer.json"))
    written = {
        "tokenizer_class": named,
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHATML,
        "a": 1,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(written | config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 480}))
    return folder


def model_of(folder, *tokens):
    return Model(name_or_path=str(folder), dtype="float32", extra_special_tokens=list(tokens))


def of_file(folder, text):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


def stored(folder, model):
    """Store the tokenizer as prepared data has it; return it, loaded again, and its tokenizer_config.json."""
    tokenizers.write_files(load_tokenizer(model, Data(path="unread")), model, folder)
    return tokenizers.load(folder), json.loads((folder / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(
    ("named", "is_kept"),
    [
        ("GPT2Tokenizer", False),
        ("Qwen2TokenizerFast", False),
        ("GPTNeoXTokenizer", False),
        ("GemmaTokenizer", False),  # it has an <unk> of its own, and encodes nothing without it
        ("LlamaTokenizer", True),
        ("OfNoRelease", True),
    ],
)
def test_the_file_decides(named, is_kept, tmp_path):
    from transformers import AutoTokenizer

    base = write_base(tmp_path / "base", named)
    wanted, loaded = of_file(base, TEXT), load_tokenizer(model_of(base), Data(path="unread"))
    again, config = stored(tmp_path / "stored", model_of(base))
    assert loaded(TEXT)["input_ids"] == again(TEXT)["input_ids"] == wanted
    assert (tmp_path / "stored/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    # Whoever loads the artifact by transformers alone gets the tokens that were trained.
    assert AutoTokenizer.from_pretrained(tmp_path / "stored")(TEXT)["input_ids"] == wanted
    assert config["tokenizer_class"] == (named if is_kept else "PreTrainedTokenizerFast")
    assert config["a"] == 1
    assert config["chat_template"] == CHATML


def test_a_class_with_the_files_rules_stays_named(tmp_path):
    # The rules of GPT-2's class, written as another step.
    rules = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    base = write_base(tmp_path / "base", "GPT2Tokenizer", rules)
    loaded = load_tokenizer(model_of(base), Data(path="unread"))
    assert loaded.otherwise is None
    assert stored(tmp_path / "stored", model_of(base))[1]["tokenizer_class"] == "GPT2Tokenizer"


def test_added_tokens_are_the_only_change(tmp_path):
    base = write_base(tmp_path / "base", "GPT2Tokenizer", added_tokens_decoder={})
    model = model_of(base, "<|a|>", "<|im_start|>", "<|b|>")
    again, config = stored(tmp_path / "stored", model)
    before, after = (
        json.loads((folder / "tokenizer.json").read_text()) for folder in (base, tmp_path / "stored")
    )
    added = [token for token in after["added_tokens"] if token not in before["added_tokens"]]
    assert [token["content"] for token in added] == ["<|a|>", "<|b|>"]
    assert after | {"added_tokens": before["added_tokens"]} == before
    assert (
        [token["id"] for token in added]
        == again.convert_tokens_to_ids(["<|a|>", "<|b|>"])
        == vocabulary.load_ids(model)[0][::2]
    )
    assert config["additional_special_tokens"] == ["<|a|>", "<|im_start|>", "<|b|>"]
    assert again("x<|a|>y")["input_ids"][1] == added[0]["id"]


def test_the_contract_names_a_difference_of_the_data_alone(tmp_path):
    # GPT-2's rules, but for letters and a digit that no probe has.
    rules = r" ?q7z|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    base, found = write_base(tmp_path / "base", "GPT2Tokenizer", rules), {}
    for name, word in (("usual", "zip"), ("rare", "q7z")):
        rows = [{"text": f"Row {number}: {word} and {word}"} for number in range(8)]
        recipe = Recipe.model_validate(tiny_recipe(base, write_rows(tmp_path / f"{name}.jsonl", rows)))
        data.prepare(
            DataRequest(model=recipe.model, data=recipe.data, fingerprint=name), tmp_path / name, processes=1
        )
        checks = data.contract.Contract.read(tmp_path / name / "contract.json").checks
        found[name] = [check.found for check in checks if check.name == "tokenizer"]
        config = json.loads((tmp_path / name / "tokenizer/tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == ("PreTrainedTokenizerFast" if name == "rare" else "GPT2Tokenizer")
    assert found["usual"] == []
    assert "GPT2Tokenizer makes" in found["rare"][0]
    assert "the base's tokenizer.json is used" in found["rare"][0]


def test_code_that_makes_other_tokens_is_refused(tmp_path):
    base = write_base(tmp_path / "base", "Own", auto_map={"AutoTokenizer": [None, "own.Own"]})
    (base / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n"
        "class Own(PreTrainedTokenizerFast):\n"
        "    def __call__(self, text, **options):\n"
        "        return super().__call__(text.lower(), **options)\n"
    )
    model = model_of(base).model_copy(update={"trust_remote_code": True})
    with pytest.raises(DataError, match=r"the code of Own makes other tokens of .* than its tokenizer.json"):
        load_tokenizer(model, Data(path="unread"))


def test_stored_files_are_the_same_without_a_hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    base = write_base(tmp_path / "base", "TokenizersBackend", backend="tokenizers")
    read = []
    for is_offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        folder = tmp_path / str(is_offline)
        folder.mkdir()
        read.append(stored(folder, model_of(base))[1])
    assert read[0] == read[1]
