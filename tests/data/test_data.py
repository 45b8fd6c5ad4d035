"""From rows to stored shards: nothing lost, nothing told wrong, nothing half done."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from flytune import data
from flytune.data import heldout_rows, shards
from flytune.errors import DataError
from flytune.recipe import Data, DataRequest, Model
from flytune.records import Manifest
from tests.support.chats import checks_of, request, stored, tokenizer_folder
from tests.support.paths import ROOT
from tests.support.stages import write_dataset
from tests.support.tiny import tiny_base, write_rows

PAIRS = [{"prompt": f"ask {n}:", "completion": f" say {n}"} for n in range(300)]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "pairs.jsonl", PAIRS)


def refused(asked: DataRequest, out: Path) -> str:
    with pytest.raises(DataError) as caught:
        data.prepare(asked, out)
    assert not (out / "manifest.json").exists()
    return str(caught.value)


def test_all_rows_are_stored_however_short(tokenizer: Path, pairs: Path, tmp_path: Path) -> None:
    manifest = data.prepare(request(tokenizer, path=str(pairs)), tmp_path / "out")
    assert manifest == Manifest.read(tmp_path / "out" / "manifest.json")
    assert (manifest.source, manifest.format, manifest.rows) == (str(pairs), "prompt_completion", 300)
    assert manifest.train.samples + manifest.heldout.samples == 300
    assert (manifest.truncated, manifest.dropped_too_long, manifest.dropped_untrained) == (0, 0, 0)
    rows = {split: stored(tmp_path / "out", split) for split in ("train", "heldout")}
    for split, counts in (("train", manifest.train), ("heldout", manifest.heldout)):
        assert counts.samples == len(rows[split]) == sum(shard.samples for shard in counts.shards)
        assert (
            counts.tokens
            == sum(len(row["input_ids"]) for row in rows[split])
            == sum(shard.tokens for shard in counts.shards)
        )
        assert counts.trained_tokens == sum(label != -100 for row in rows[split] for label in row["labels"])
        for shard in counts.shards:
            assert hashlib.sha256((tmp_path / "out" / shard.file).read_bytes()).hexdigest() == shard.sha256
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    texts = {saved.decode(row["input_ids"]) for row in rows["train"] + rows["heldout"]}
    assert texts == {row["prompt"] + row["completion"] + "</s>" for row in PAIRS}
    assert saved.pad_token == "<|pad|>"
    lengths = [len(row["input_ids"]) for row in rows["train"] + rows["heldout"]]
    assert manifest.longest == max(lengths)
    assert sum(bin.samples for bin in manifest.histogram) == 300
    for bin in manifest.histogram:
        assert bin.samples == sum(bin.low <= length < bin.high for length in lengths)
    assert len(manifest.histogram) <= 12


def test_equal_requests_give_equal_bytes_and_the_split_is_by_content(
    tokenizer: Path, pairs: Path, tmp_path: Path
) -> None:
    first, again = (
        data.prepare(request(tokenizer, path=str(pairs)), tmp_path / name) for name in ("first", "again")
    )
    assert first == again
    twice = write_rows(tmp_path / "twice.jsonl", PAIRS[::-1] + PAIRS)
    data.prepare(request(tokenizer, path=str(twice)), tmp_path / "twice")
    sides = {}
    for name in ("first", "twice"):
        sides[name] = [
            {tuple(row["input_ids"]) for row in stored(tmp_path / name, split)}
            for split in ("train", "heldout")
        ]
        assert not sides[name][0] & sides[name][1]
    assert sides["first"] == sides["twice"], "a sample's side follows from its content, not from its place"
    assert 0.2 < len(sides["first"][1]) / 300 < 0.4
    other = data.prepare(request(tokenizer, path=str(pairs), seed=1), tmp_path / "other")
    assert other.content_sha256 != first.content_sha256


def test_shards_are_cut_and_loaded_as_one(
    tokenizer: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flytune.data.shards.SAMPLES_A_SHARD", 50)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    manifest = data.prepare(request(tokenizer, path=str(pairs)), tmp_path / "out")
    assert [shard.file for shard in manifest.train.shards[:2]] == [
        "train/00000.parquet",
        "train/00001.parquet",
    ]
    assert [shard.samples for shard in manifest.train.shards[:-1]] == [50] * (len(manifest.train.shards) - 1)
    assert len(manifest.train.shards) > 2
    for split in ("train", "heldout"):
        dataset = data.load(tmp_path / "out", split)
        assert dataset.column_names == ["input_ids", "labels"] + (["source"] if split == "heldout" else [])
        assert list(dataset) == stored(tmp_path / "out", split)


def test_a_folder_that_is_not_whole_is_refused(
    tokenizer: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out = tmp_path / "out"
    data.prepare(request(tokenizer, path=str(pairs)), out)
    shards = {split: out / split / "00000.parquet" for split in ("train", "heldout")}
    for split, shard in shards.items():
        whole = shard.read_bytes()
        # With one bit of a label changed, the file is Parquet still, of the same size and counts.
        flipped = bytearray(whole)
        flipped[len(whole) // 3] ^= 1
        for other in (
            whole[: len(whole) // 2],
            bytes(flipped),
            shards["heldout"].read_bytes() if split == "train" else b"",
        ):
            shard.write_bytes(other)
            with pytest.raises(
                DataError,
                match=rf"{split}/00000\.parquet: its content is not what was prepared; prepare the data "
                r"again",
            ):
                data.load(out, split)
    shards["train"].unlink()
    with pytest.raises(
        DataError, match=r"train/00000\.parquet missing; prepare the data again .*`pyflyte local-cache clear`"
    ):
        data.load(out, "train")
    (out / "manifest.json").write_text("{}")
    with pytest.raises(
        DataError, match=r"manifest\.json: not a valid manifest \(\d+ mistakes: .*\); prepare the data again"
    ):
        data.load(out, "train")
    (out / "manifest.json").unlink()
    with pytest.raises(
        DataError, match=r"out: no manifest\.json, so the preparation never finished; prepare the data again"
    ):
        data.load(out, "train")
    assert refused(request(tokenizer, path=str(pairs)), out).endswith(
        "out: not empty; prepared data needs a folder of its own"
    )


def test_a_preparation_that_breaks_off_leaves_no_manifest(tokenizer: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [*PAIRS, {"prompt": "no completion"}])
    assert refused(request(tokenizer, path=str(source)), tmp_path / "out") == (
        f"{source}:301: column completion is missing; the columns are prompt"
    )
    with pytest.raises(DataError, match="the preparation never finished"):
        data.load(tmp_path / "out", "train")


LONG = [
    *PAIRS[:60],
    {"prompt": "ask", "completion": " fox" * 200},
    {"prompt": "ask " * 200, "completion": " lost"},
]


def test_too_long_is_cut_dropped_or_refused(tokenizer: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", LONG)
    cut, dropped = (
        data.prepare(request(tokenizer, path=str(source), max_length=32, too_long=what), tmp_path / what)
        for what in ("truncate", "drop")
    )
    assert (cut.rows, cut.truncated, cut.dropped_too_long, cut.dropped_untrained) == (62, 2, 0, 1)
    assert cut.train.samples + cut.heldout.samples == 61
    assert (dropped.truncated, dropped.dropped_too_long, dropped.dropped_untrained) == (0, 2, 0)
    assert dropped.train.samples + dropped.heldout.samples == 60
    assert cut.longest == dropped.longest > 200
    assert (
        max(
            len(row["input_ids"])
            for split in ("train", "heldout")
            for row in stored(tmp_path / "truncate", split)
        )
        == 32
    )
    message = refused(
        request(tokenizer, path=str(source), max_length=32, too_long="error"), tmp_path / "error"
    )
    assert message.startswith(f"{source}:61: ")
    assert message.endswith(
        "tokens, more than data.max_length 32; raise it, or set data.too_long to truncate, split or drop"
    )


def test_heldout_path_keeps_the_sides_as_they_are(tokenizer: Path, pairs: Path, tmp_path: Path) -> None:
    heldout = write_rows(
        tmp_path / "heldout.jsonl", [{"prompt": "other", "completion": f" {n}"} for n in range(7)]
    )
    manifest = data.prepare(
        request(tokenizer, path=str(pairs), heldout_path=str(heldout), max_samples=100), tmp_path / "out"
    )
    assert (manifest.train.samples, manifest.heldout.samples, manifest.rows) == (100, 7, 107)
    empty = write_rows(tmp_path / "empty.jsonl", [])
    message = refused(request(tokenizer, path=str(pairs), heldout_path=str(empty)), tmp_path / "none")
    assert message == f"{empty}: no held-out sample is left; 0 were too long, 0 had no trained token"


def test_empty_sides_are_refused_with_what_to_do(tokenizer: Path, pairs: Path, tmp_path: Path) -> None:
    empty = write_rows(tmp_path / "empty.jsonl", [])
    assert (
        refused(request(tokenizer, path=str(empty)), tmp_path / "a")
        == f"{empty}: no row was found; the file is empty"
    )
    equal = write_rows(tmp_path / "equal.jsonl", [{"prompt": "a", "completion": " b"}] * 9)
    message = refused(request(tokenizer, path=str(equal)), tmp_path / "b")
    assert message == (
        f"{equal}: no held-out sample: 9 samples with the same content, or the same prompt, which stay "
        "together; add data, set data.heldout_path, or write data.heldout_fraction: 0"
    )
    message = refused(request(tokenizer, path=str(pairs), max_length=3), tmp_path / "d")
    longest = re.search(r"the longest has (\d+) tokens", message)
    assert longest is not None
    assert int(longest[1]) > 3
    assert message == (
        f"{pairs}: none of 300 rows is left: 300 are longer than data.max_length 3 (the longest has "
        f"{longest[1]} tokens), 300 have no trained token within it (the answer is missing, empty or cut "
        "off); raise data.max_length"
    )


def test_small_data_has_the_same_held_out_sample_whatever_the_fraction(
    tokenizer: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"q{n}", "completion": f" a{n}"} for n in range(24)]
    source = write_rows(tmp_path / "few.jsonl", [*rows, *rows])

    def heldout(fraction: float, folder: Path) -> list[list[int]]:
        manifest = data.prepare(request(tokenizer, path=str(source), heldout_fraction=fraction), folder)
        assert manifest.train.samples + manifest.heldout.samples == 48
        assert manifest.rows == 48
        assert manifest.train.samples
        return [row["input_ids"] for row in heldout_rows(folder, 48)]

    few = {fraction: heldout(fraction, tmp_path / f"{fraction}") for fraction in (1e-9, 1e-4, 0.5, 1 - 1e-9)}
    assert few[1e-9] == few[1e-4]
    assert len(few[1e-9]) == 2  # both copies of one row
    assert few[1e-9][0] == few[1e-9][1]
    assert few[1e-9][0] in few[0.5]
    assert len(few[1 - 1e-9]) == 46
    # The row is the one of the smallest hash, which the smallest fraction that holds out any takes by chance
    # as well.
    numbers = {
        int.from_bytes(hashlib.sha256(b"42:" + numpy.asarray(ids, "<i4").tobytes()).digest()[:8], "big"): ids
        for ids in few[1 - 1e-9]
    }
    assert few[1e-9][0] == numbers[min(numbers)]


def test_the_shipped_templates_serve_a_base_model(pairs: Path, tmp_path: Path) -> None:
    bare = tokenizer_folder(tmp_path / "bare", None)
    source = write_rows(
        tmp_path / "rows.jsonl", [{"instruction": f"q{n}", "output": f"a{n}"} for n in range(40)]
    )
    message = refused(request(bare, path=str(source)), tmp_path / "none")
    assert message == (
        f"data.chat_template: the tokenizer of {bare} has no chat template, and the format instruction needs "
        "one; set a Jinja file, or one that is shipped: alpaca, chatml, chatml_tools, llama3"
    )
    data.prepare(request(bare, path=str(pairs)), tmp_path / "raw")
    for name in ("chatml", "alpaca", "chatml_tools", "llama3"):
        template = ROOT / "chat_templates" / f"{name}.jinja"
        data.prepare(request(bare, path=str(source), chat_template=name), tmp_path / name)
        assert (tmp_path / name / "tokenizer" / "chat_template.jinja").read_text() == template.read_text()
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for message in messages %}\n{{ message['content' }}")
    message = refused(request(bare, path=str(source), chat_template=str(broken)), tmp_path / "broken")
    assert message.startswith(f"data.chat_template: {broken}: line 2: not a Jinja template: unexpected '}}'")


def test_tokenizers_that_lack_something(pairs: Path, tmp_path: Path) -> None:
    unpadded = tokenizer_folder(tmp_path / "unpadded", pad_token=None, unk_token="<unk>")
    data.prepare(request(unpadded, path=str(pairs)), tmp_path / "a")
    assert (
        json.loads((tmp_path / "a" / "tokenizer" / "tokenizer_config.json").read_text())["pad_token"]
        == "<|pad|>"
    )
    message = refused(request(unpadded, path=str(pairs), pad_token="[PAD]"), tmp_path / "b")
    assert message.startswith(
        f"data.pad_token: '[PAD]' is not one of the tokens of the tokenizer of {unpadded}; it must be a "
        "single token"
    )
    data.prepare(request(unpadded, path=str(pairs), pad_token="<|pad|>"), tmp_path / "c")
    assert (
        json.loads((tmp_path / "c" / "tokenizer" / "tokenizer_config.json").read_text())["pad_token"]
        == "<|pad|>"
    )
    endless = tokenizer_folder(tmp_path / "endless", eos_token=None)
    assert "has no EOS token, so no answer could end; set data.eos_token" in refused(
        request(endless, path=str(pairs)), tmp_path / "d"
    )


def test_a_slow_tokenizer_is_refused(pairs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    message = refused(request(folder, path=str(pairs)), tmp_path / "out")
    assert (
        f"the tokenizer of {folder} is a slow one (ByT5Tokenizer), which does not report the positions of "
        "tokens in the text" in message
    )


def test_models_that_cannot_be_read(pairs: Path, tmp_path: Path) -> None:
    message = refused(request(tmp_path / "gone", path=str(pairs)), tmp_path / "a")
    assert message.startswith(f"model.name_or_path: {tmp_path}/gone: no such folder (seen from ")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "notes.txt").touch()
    message = refused(request(tmp_path / "hollow", path=str(pairs)), tmp_path / "b")
    assert (
        f"{tmp_path}/hollow: the folder has no tokenizer: none of tokenizer.json, tokenizer.model, "
        in message
    )
    on_hub = DataRequest(model=Model(name_or_path="owner/model"), data=Data(path=str(pairs)), fingerprint="0")
    assert refused(on_hub, tmp_path / "c") == (
        "model.name_or_path: owner/model: not on this machine, and the hub cannot be reached (HF_HUB_OFFLINE "
        "is set)"
    )


def test_prepares_where_torch_is_not_installed(tokenizer: Path, pairs: Path, tmp_path: Path) -> None:
    asked = request(tokenizer, path=str(pairs))
    script = f"""
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "torch" else find(name, *rest)
sys.modules["torch"] = None  # importing it raises ModuleNotFoundError
from pathlib import Path
from flytune import data
from flytune.data import shards
from flytune.recipe.recipe import DataRequest
data.prepare(DataRequest.model_validate_json({asked.model_dump_json()!r}), Path({str(tmp_path / "out")!r}))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    assert Manifest.read(tmp_path / "out" / "manifest.json") == data.prepare(asked, tmp_path / "here")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_address_on_s3(tokenizer: Path, bucket: str, tmp_path: Path) -> None:
    import fsspec

    files = fsspec.filesystem("s3")
    for half in (0, 1):
        rows = "".join(json.dumps(row) + "\n" for row in PAIRS[half::2])
        files.pipe_file(f"{bucket}/pairs/{half}.jsonl", rows.encode())
    asked = request(tokenizer, path=f"{bucket}/pairs")
    before = data.fingerprint(asked.data)
    assert before == data.fingerprint(asked.data)
    manifest = data.prepare(asked, tmp_path / "out")
    assert (manifest.rows, manifest.source) == (300, "s3://models/pairs")
    files.pipe_file(f"{bucket}/pairs/1.jsonl", b'{"text": "other"}\nnope\n')
    assert data.fingerprint(asked.data) != before
    message = refused(asked, tmp_path / "bad")
    assert message.startswith("s3://models/pairs/1.jsonl:1: column prompt is missing; the columns are text")
    with pytest.raises(DataError, match="s3://models/gone: no such file or folder at this address, or these"):
        data.fingerprint(Data(path=f"{bucket}/gone"))


def test_bos_and_eos_of_raw_text_are_in_the_contract_and_refused_for_chats(
    tokenizer: Path, pairs: Path, tmp_path: Path
) -> None:
    switches: dict[str, Any] = {"add_bos_token": True, "add_eos_token": False}
    assert data.prepare(request(tokenizer, path=str(pairs), **switches), tmp_path / "out").train.samples
    checks = checks_of(tmp_path / "out")
    assert (
        checks["BOS"].found
        == "300 of 300 samples begin with '<s>', none of them twice (data.add_bos_token is true)"
    )
    assert (checks["end marker"].verdict, checks["end marker"].count) == ("warning", 300)
    assert checks["end marker"].advice.startswith(
        "data.add_eos_token is false: the model does not learn to stop"
    )
    chats = write_rows(
        tmp_path / "chats.jsonl", [{"instruction": f"q {n}", "output": "a"} for n in range(30)]
    )
    for name, value in switches.items():
        message = refused(
            request(tokenizer, path=str(chats), max_bad_fraction=0.5, **{name: value}), tmp_path / name
        )
        assert message == (
            f"data.{name}: only for raw text (text, prompt_completion), and the data's format is "
            "instruction; remove it; the chat template writes these tokens (data.chat_template)"
        )
    bare = tokenizer_folder(tmp_path / "bare", bos_token=None)
    message = refused(request(bare, path=str(pairs), add_bos_token=True), tmp_path / "none")
    assert message == f"data.add_bos_token: the tokenizer of {bare} has no BOS token; remove this line"


def test_a_shard_whose_hash_was_changed_too_is_found_by_the_manifests_own(tmp_path):
    folder = write_dataset(tmp_path / "dataset", tiny_base(tmp_path))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["train"]["shards"][0]["sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="changed: its hashes are not those of content_sha256"):
        shards.load(folder, "train")
