"""Every line of the contract: found where it is broken, silent where it holds."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from flytune import data
from flytune.data import contract
from flytune.data.contract import CONTRACT, Contract, duplicates
from flytune.data.shards import SplitWriter
from flytune.errors import DataError
from flytune.recipe import Data
from flytune.records import Manifest
from tests.support.chats import CHATML, LLAMA2, checks_of, prepared, request, tokenizer_folder
from tests.support.stages import manifest as manifest_of
from tests.support.tiny import write_rows

Sample = tuple[list[int], list[int]]


def sample(loaded: Any, prompt: str, answer: str) -> Sample:
    before, after = (loaded(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    return before + after, [-100] * len(before) + after


def good(loaded: Any, count: int, first: int = 0, length: int = 9) -> list[Sample]:
    draw = random.Random(first)
    words = [
        "fox",
        "dog",
        "lazy",
        "quick",
        "brown",
        "jumps",
        "over",
        "user",
        "foobar",
        "fizz",
        "ok",
        "response",
    ]
    texts = [[" ".join(draw.choices(words, k=many)) for many in (9, length)] for _ in range(count)]
    return [sample(loaded, asked, f" {answer} {first + n}</s>") for n, (asked, answer) in enumerate(texts)]


def written(
    folder: Path, train: list[Sample], heldout: list[Sample], packed_length: int | None = None
) -> Manifest:
    """Store samples as they are given."""
    counts = {}
    for split, samples, length in (("train", train, packed_length), ("heldout", heldout, None)):
        with SplitWriter(folder, split, length) as writer:
            for sample in samples:
                writer.add(sample)
            counts[split] = writer.counts()
    base = manifest_of(
        [{"input_ids": ids} for ids, _ in train], {split: count.shards for split, count in counts.items()}
    )
    return base.model_copy(update=counts)


def checked(
    folder: Path,
    loaded: Any,
    train: list[Sample],
    heldout: list[Sample],
    *,
    packed: bool = False,
    max_length: int = 128,
    **asked: Any,
) -> Contract:
    """The contract of samples that are stored as they are given."""
    changes = {"truncated": 0, "dropped_untrained": 0, "max_length": max_length, **asked.pop("manifest", {})}
    made = written(folder, train, heldout, max_length if packed else None).model_copy(update=changes)
    return contract.check(folder, made, Data(path="x", **asked), loaded)


def verdicts(found: Contract) -> dict[str, str]:
    return {check.name: check.verdict for check in found.checks if check.verdict != "ok"}


def line(found: Contract, name: str) -> contract.Check:
    return next(check for check in found.checks if check.name == name)


@pytest.mark.parametrize("packed", [False, True])
def test_good_data_hold_every_line(packed, loaded, tmp_path):
    found = checked(tmp_path, loaded, good(loaded, 300), good(loaded, 20, 1000), packed=packed)
    assert verdicts(found) == {}
    assert found.verdict == "ok"
    assert len({check.name for check in found.checks}) == len(found.checks) == 21
    assert all(check.advice == check.example == "" for check in found.checks)
    assert (
        line(found, "end marker").found
        == "each of 320 uncut samples ends with a trained one; of all answers: 320 × '</s>'"
    )
    assert line(found, "round trip").found.endswith(
        "samples, decoded and tokenized again, agree token for token"
    )
    assert 200 < line(found, "round trip").of <= 320


def broken(loaded: Any, name: str) -> list[Sample]:
    """300 good samples, of which six are broken in one way."""
    rows = good(loaded, 300)
    bos = loaded.bos_token_id
    for index in range(50, 56):
        ids, labels = list(rows[index][0]), list(rows[index][1])
        if name == "trained tokens":
            labels = [-100] * len(ids)
        elif name == "end marker":
            ids, labels = ids[:-1], labels[:-1]
        elif name == "pad token":
            labels[-1] = -100
        elif name == "BOS":
            ids, labels = [bos, bos, *ids], [-100, -100, *labels]
        elif name == "vocabulary":
            ids[3] = len(loaded)
        elif name == "end of each answer":
            labels[3] = ids[3]
        elif name == "duplicates":
            ids, labels = rows[0]
        elif name == "end marker is EOS":
            ids[-1] = labels[-1] = loaded.convert_tokens_to_ids("<|im_end|>")
        else:
            assert name == "nothing"
        rows[index] = (ids, labels)
    return rows


@pytest.mark.parametrize(
    ("name", "verdict", "counted", "advice"),
    [
        ("trained tokens", "stop", 6, "a batch of such samples alone has no loss"),
        ("end marker", "stop", 6, "the model does not learn to stop"),
        ("pad token", "stop", 6, "was masked like padding"),
        ("BOS", "stop", 6, "the tokenizer adds another"),
        ("vocabulary", "stop", 6, "another tokenizer"),
        ("end of each answer", "warning", 6, "would continue as the user"),
        ("duplicates", "warning", 6, "the model memorizes them first"),
        ("end marker is EOS", "warning", 6, "make '<|im_end|>' the eos_token"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_broken_line_is_found_counted_and_told(name, verdict, counted, advice, packed, loaded, tmp_path):
    found = checked(tmp_path, loaded, broken(loaded, name), good(loaded, 20, 1000), packed=packed)
    told = line(found, name)
    assert (told.verdict, told.count) == (verdict, counted)
    assert advice in told.advice
    # A masked end is both: no end that is trained, and an end that is masked; alien ids do not come back from
    # text.
    besides = {"pad token": {"end marker"}, "vocabulary": {"round trip"}}.get(name, set())
    assert set(verdicts(found)) - besides == {name}
    if name not in ("duplicates", "end marker is EOS"):
        assert told.example.startswith("train/00000.parquet row ")
        if not packed:
            assert told.example.startswith("train/00000.parquet row 50: ")


def test_pad_that_is_eos_is_fine_while_eos_is_trained(loaded, tmp_path):
    import copy

    other = copy.deepcopy(loaded)
    other.pad_token = other.eos_token
    found = checked(tmp_path / "a", other, good(loaded, 100), good(loaded, 10, 1000))
    assert line(found, "pad token").found == "'</s>' is also EOS, and EOS is trained"
    masked = checked(tmp_path / "b", other, broken(loaded, "pad token"), good(loaded, 10, 1000))
    assert line(masked, "pad token").found == (
        "6 of 310 answers are followed by an end marker without a label, which is also the pad token '</s>'"
    )


def test_white_space_behind_the_end_marker_is_no_fault(loaded, tmp_path):
    rows = [sample(loaded, "<|im_start|>user\n", f"ok {n} fizz fox<|im_end|>\n\n") for n in range(60)]
    found = checked(tmp_path, loaded, rows, good(loaded, 5))
    assert line(found, "end marker").verdict == "ok"


def test_an_end_token_that_is_not_special_is_seen(tokenizer, tmp_path):
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(str(tokenizer))
    made.add_tokens([AddedToken("<|done|>", special=False)])
    made.chat_template = CHATML.replace("im_end", "done")
    made.save_pretrained(tmp_path / "tokenizer")
    rows = [{"instruction": f"ask {n}", "output": f"say {n} fox"} for n in range(100)]
    prepared(tmp_path / "tokenizer", rows, tmp_path / "out")
    checks = checks_of(tmp_path / "out")
    assert "100 × '<|done|>'" in checks["end marker"].found
    assert checks["end marker is EOS"].verdict == "warning"


def test_chats_that_end_with_a_question_do_not_stop_where_all_is_trained(tmp_path):
    said = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]
    rows = [{"messages": [*said, {"role": "user", "content": f"fizz {n}"}]} for n in range(100)]
    prepared(
        tokenizer_folder(tmp_path / "tokenizer", LLAMA2), rows, tmp_path / "out", completion_only_loss=False
    )
    told = checks_of(tmp_path / "out")["end marker"]
    assert (told.verdict, told.count) == ("warning", 100)
    assert told.advice.startswith("a chat that ends with a question needs none")


def test_cut_samples_need_no_end(loaded, tmp_path):
    rows = [(ids[:12], labels[:12]) for ids, labels in good(loaded, 100)]
    found = checked(tmp_path, loaded, rows, good(loaded, 10, 1000), max_length=12)
    assert line(found, "end marker").of < 20
    assert line(found, "end marker").verdict == "ok"


def test_special_tokens_in_pieces(loaded, tmp_path):
    import copy

    other = copy.deepcopy(loaded)
    other.chat_template = CHATML.replace("im_end", "eot_of_ours")
    found = checked(tmp_path, other, good(loaded, 50), good(loaded, 5, 1000))
    told = line(found, "special tokens")
    assert (told.verdict, told.found) == ("warning", "split into several tokens: <|eot_of_ours|>")


def test_tokens_that_their_text_does_not_give(loaded, tmp_path):
    rows = good(loaded, 100)
    apart = [loaded(letter, add_special_tokens=False)["input_ids"][0] for letter in "the quick brown fox"]
    odd = [(apart + ids[-3:], [-100] * len(apart) + labels[-3:]) for ids, labels in rows]
    found = checked(tmp_path / "all", loaded, odd, good(loaded, 5, 1000))
    assert line(found, "round trip").verdict == "stop"
    some = checked(tmp_path / "some", loaded, odd[:10] + rows, good(loaded, 5, 1000))
    assert line(some, "round trip").verdict == "warning"
    assert "the quick brown fox" in line(some, "round trip").example


@pytest.mark.parametrize(
    ("field", "limit", "name", "counts"),
    [
        ("min_trained_fraction", 0.9, "trained share", {}),
        ("max_truncated_fraction", 0.01, "truncated", {"truncated": 2}),
        (
            "max_truncated_fraction",
            0.01,
            "truncated tokens",
            {"truncated": 1, "truncated_tokens": 40, "tokens_read": 2000},
        ),
        ("max_dropped_fraction", 0.01, "dropped", {"dropped_too_long": 1, "dropped_untrained": 2}),
        (
            "max_dropped_fraction",
            0.01,
            "dropped tokens",
            {"dropped_too_long": 1, "dropped_tokens": 40, "tokens_read": 2000},
        ),
    ],
)
def test_limits_of_the_recipe_stop(field, limit, name, counts, loaded, tmp_path):
    rows, heldout = good(loaded, 100), good(loaded, 5, 1000)
    assert line(checked(tmp_path / "none", loaded, rows, heldout, manifest=counts), name).verdict == "ok"
    told = line(checked(tmp_path / "limit", loaded, rows, heldout, manifest=counts, **{field: limit}), name)
    assert told.verdict == "stop"
    assert f"data.{field}" in told.limit


def test_cut_samples_are_a_doubt_once_they_are_most(loaded, tmp_path):
    rows, heldout = good(loaded, 10), good(loaded, 5, 1000)
    cut = {"truncated": 12, "rows": 20}
    assert checked(tmp_path / "some", loaded, rows, heldout, manifest=cut | {"truncated": 9}).doubts == []
    assert checked(tmp_path / "most", loaded, rows, heldout, manifest=cut).doubts == [
        "12 of 20 samples were cut at 128 tokens (60 %)"
    ]


def test_overlap_and_near_duplicates(loaded, tmp_path):
    rows, heldout = good(loaded, 300, length=40), good(loaded, 20, 1000, length=40)
    near = [(ids[:-2] + ids[-3:], labels[:-2] + labels[-3:]) for ids, labels in rows[:40]]
    found = checked(tmp_path / "one", loaded, rows, heldout[:19] + rows[:1])
    assert line(found, "overlap").verdict == "warning", "single rows are not a fault of the recipe"
    found = checked(tmp_path / "a", loaded, rows, heldout[:18] + rows[:2])
    assert (line(found, "overlap").verdict, line(found, "overlap").found) == (
        "stop",
        "2 of 20 held-out samples are also trained on",
    )
    found = checked(tmp_path / "b", loaded, rows + near[20:], heldout + near[:20], max_length=512)
    assert line(found, "near duplicates").count == pytest.approx(20, abs=2)
    assert line(found, "near overlap").count == pytest.approx(20, abs=2)
    assert line(found, "near overlap").verdict == line(found, "near duplicates").verdict == "warning"
    assert found.doubts == [line(found, "near overlap").found]
    assert line(found, "overlap").count == line(found, "duplicates").count == 0


def test_what_a_weight_repeats_is_meant(tokenizer, tmp_path):
    """But not the duplicates that the data have besides, and none can be left out by data.deduplicate."""
    rows = [{"prompt": f"ask {n}:", "completion": f" say {n} fox"} for n in range(200)]
    twice = {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "weight": 2}
    once = {
        "path": str(
            write_rows(tmp_path / "more.jsonl", [{**row, "prompt": f"more {row['prompt']}"} for row in rows])
        )
    }
    manifest = data.prepare(request(tokenizer, sources=[twice, once]), tmp_path / "fine")
    told = checks_of(tmp_path / "fine")["duplicates"]
    assert told.verdict == "ok"
    assert told.count == manifest.train.samples + manifest.heldout.samples - 400
    assert re.search(rf"\(about 1\d\d by a weight above 1: {twice['path']}: 2\)", told.found)
    same = {"path": str(write_rows(tmp_path / "same.jsonl", [*rows[:80], *rows[:80]]))}
    data.prepare(request(tokenizer, sources=[twice, same]), tmp_path / "bad")
    told = checks_of(tmp_path / "bad")["duplicates"]
    assert told.verdict == "warning"
    assert "remove them from the data; data.deduplicate requires that no weight is above 1" in told.advice


def test_copies_of_one_sample_are_not_held(loaded, tmp_path, monkeypatch):
    from flytune.data.contract.statistics import Statistics

    monkeypatch.setattr("flytune.data.contract.statistics.HASHES", 700)
    monkeypatch.setattr("flytune.data.contract.statistics.TRIP_SAMPLES", 1400)
    rows, heldout = good(loaded, 300), good(loaded, 20, 1000)
    made = written(tmp_path, [*rows, *rows[:1] * 400], [*heldout, *rows[:1] * 30])
    statistics = Statistics.read(tmp_path, made.model_copy(update={"max_length": 128}), loaded)
    assert statistics.round_trip().tried == 320
    found = statistics.duplicates()
    assert (found.near_train, found.near_heldout) == (300, 21)
    # All copies of one sample are drawn with it, or none.
    assert found.equal % 400 == found.overlap % 30 == 0


def test_hashes_are_held_once():
    import numpy

    held = duplicates.Hashes(10)
    values = numpy.arange(1000, dtype=numpy.uint64)
    assert not held.contains(values).any()
    for start in range(0, 1000, 4):
        held.add(values[[start, start, start + 1]])
    found, counts = held.counts()
    assert (len(found), counts.sum()) == (500, 750)
    assert counts.tolist() == [2, 1] * 250
    assert held.contains(values).tolist() == [value % 4 < 2 for value in range(1000)]
    held.add(values, 0.5)  # all of these are below half of 2**64
    assert held.counts()[1].sum() == 1750


def test_minhash_agrees_with_resemblance():
    import numpy

    draw = numpy.random.default_rng(0)
    base = draw.integers(0, 1000, 400).astype(numpy.int32)
    other = numpy.concatenate([base[:300], draw.integers(0, 1000, 100).astype(numpy.int32)])
    signed, which = duplicates.signatures([base, other, base, base[:3]])
    # 296 of 496 different 5-grams are in both.
    assert (signed[0] == signed[1]).mean() == pytest.approx(296 / 496, abs=0.18)
    assert which.tolist() == [0, 1, 2]
    assert duplicates.earlier(signed).tolist() == [-1, -1, 0]


def test_a_shared_system_prompt_makes_no_near_duplicates():
    import numpy

    draw = numpy.random.default_rng(0)
    system = draw.integers(0, 1000, 300).astype(numpy.int32)
    samples = [
        numpy.concatenate([system, draw.integers(0, 1000, 20).astype(numpy.int32)]) for _ in range(300)
    ]
    assert (duplicates.earlier(duplicates.signatures(samples)[0]) >= 0).sum() == 0


def test_prepare_writes_the_contract_and_stops_before_the_manifest(tokenizer, tmp_path, caplog):
    rows = [{"prompt": f"ask {n}:", "completion": f" say {n} fox"} for n in range(200)]
    good_rows = write_rows(tmp_path / "good.jsonl", rows)
    data.prepare(request(tokenizer, path=str(good_rows)), tmp_path / "good")
    assert Contract.read(tmp_path / "good" / CONTRACT).verdict != "stop"
    assert Manifest.read(tmp_path / "good" / "manifest.json").tokens_read > 0
    same = write_rows(tmp_path / "same.jsonl", rows[:50])
    asked: dict[str, Any] = {"path": str(good_rows), "heldout_path": str(same)}
    with pytest.raises(DataError) as caught:
        data.prepare(request(tokenizer, **asked), tmp_path / "bad")
    told = str(caught.value)
    assert told.startswith(
        f"{good_rows}: the prepared data fails 1 of 21 checks:\n  overlap: 50 of 50 held-out samples"
    )
    assert "data.deduplicate removes them" in told
    assert "data.contract: warn" in told
    assert not (tmp_path / "bad" / "manifest.json").exists()
    data.prepare(request(tokenizer, contract="warn", **asked), tmp_path / "told")
    assert Contract.read(tmp_path / "told" / CONTRACT).verdict == "stop"
    assert "overlap: 50 of 50" in caplog.text
