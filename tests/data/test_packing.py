"""Packing: every sample once and whole, and training that cannot tell packed samples from samples alone."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flytune import data
from flytune.data import Collator, pack, packing, shards, tokens_of
from flytune.data.packing import IGNORED, PackingWindow
from flytune.errors import DataError
from flytune.models import model_types
from flytune.records import Manifest, Shard
from flytune.report import model_card, page
from tests.support import packed_samples, ranks
from tests.support.chats import request, stored
from tests.support.model_types import MODEL_TYPES
from tests.support.packed_samples import ATTENTIONS, LENGTH, alone, problem_of, row, tiny_model
from tests.support.reports import run_of
from tests.support.stages import manifest, recipe_for
from tests.support.tiny import tiny_base, write_rows

FAST = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "gpt2",
    "deepseek_v3",
    "falcon_mamba",
    "lfm2",
]
"""Mistral, Gemma 2 and 3 have a sliding window that is shorter than the samples; the last two are not
packable."""


def best_fit(lengths: list[int], max_length: int) -> int:
    """How many blocks best-fit decreasing makes, by its definition."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, index) for index, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(max_length - length)
    return len(rooms)


@given(st.lists(st.integers(1, 40), max_size=120))
@settings(max_examples=200)
def test_every_sample_stands_in_one_block_and_blocks_are_as_few_as_best_fit_decreasing_makes_them(
    lengths: list[int],
) -> None:
    blocks = pack(lengths, 40)
    assert sorted(index for block in blocks for index in block) == list(range(len(lengths)))
    assert max((sum(lengths[index] for index in block) for block in blocks), default=0) <= 40
    assert len(blocks) == best_fit(lengths, 40)
    assert blocks == pack(lengths, 40) == sorted(blocks)
    assert all(block == sorted(block) for block in blocks)


@pytest.mark.parametrize("max_length", [1024, 2048, 8192])
def test_blocks_of_one_window_are_full(max_length: int) -> None:
    draw = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < max(packing.WINDOW_TOKENS, packing.WINDOW_BLOCKS * max_length):
        # Chats: half of them shorter than 200 tokens, one in fifty longer than 1300.
        lengths.append(max(2, min(max_length, int(draw.lognormvariate(5.3, 0.9)))))
    assert sum(lengths) / (len(pack(lengths, max_length)) * max_length) > 0.99


def test_a_full_window_is_packed_before_more_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WINDOW_TOKENS", 100)
    monkeypatch.setattr(packing, "WINDOW_BLOCKS", 2)
    window = PackingWindow(10)
    assert [list(window.add(([1] * 4, [1] * 4))) for _ in range(24)] == [[]] * 24
    assert [lengths for _, _, lengths in window.add(([2] * 4, [2] * 4))] == [[4, 4]] * 12 + [[4]]
    assert list(window.flush()) == []


# What prepare writes.


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": f"ask {n}:", "completion": f" say {n}" * (n % 9)} for n in range(400)]
    return write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", rows)


def samples_of(rows: list[dict[str, list[int]]]) -> list[tuple[list[int], list[int]]]:
    """The samples of packed rows, by their seq_lengths."""
    samples = []
    for block in rows:
        assert sum(block["seq_lengths"]) == len(block["input_ids"]) == len(block["labels"])
        start = 0
        for length in block["seq_lengths"]:
            samples.append(
                (block["input_ids"][start : start + length], block["labels"][start : start + length])
            )
            start += length
    return samples


def test_prepare_packs_train_and_leaves_heldout_alone(
    tokenizer: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"path": str(pairs), "max_length": LENGTH, "too_long": "drop"}
    plain = data.prepare(request(tokenizer, **asked), tmp_path / "plain")
    assert "blocks" not in (tmp_path / "plain" / "manifest.json").read_text()
    assert plain.useful_share == 1
    monkeypatch.setattr(shards, "SAMPLES_A_SHARD", 20)
    monkeypatch.setattr(packing, "WINDOW_TOKENS", 2000)
    monkeypatch.setattr(packing, "WINDOW_BLOCKS", 2)
    packed, again = (
        data.prepare(request(tokenizer, packing=True, **asked), tmp_path / name)
        for name in ("packed", "again")
    )

    assert packed == again == Manifest.read(tmp_path / "packed" / "manifest.json")
    for file in (tmp_path / "packed").rglob("*.*"):
        assert file.read_bytes() == (tmp_path / "again" / file.relative_to(tmp_path / "packed")).read_bytes()
    assert stored(tmp_path / "packed", "heldout") == stored(tmp_path / "plain", "heldout")
    assert packed.heldout.blocks is None
    rows = list(data.load(tmp_path / "packed", "train"))
    assert set(rows[0]) == {"input_ids", "labels", "seq_lengths"}
    alone = [(row["input_ids"], row["labels"]) for row in data.load(tmp_path / "plain", "train")]
    assert sorted(samples_of(rows)) == sorted(alone)
    assert [len(row["input_ids"]) <= LENGTH for row in rows] == [True] * len(rows)

    counts = packed.train
    assert (counts.samples, counts.tokens, counts.trained_tokens) == (
        plain.train.samples,
        plain.train.tokens,
        plain.train.trained_tokens,
    )
    assert counts.blocks == counts.rows == len(rows) < len(alone) == plain.train.rows
    assert packed.useful_share == counts.tokens / (len(rows) * LENGTH) > 0.9
    assert len(counts.shards) > 1
    assert sum(shard.samples for shard in counts.shards) == counts.samples
    assert (packed.histogram, packed.longest, packed.dropped_too_long) == (
        plain.histogram,
        plain.longest,
        plain.dropped_too_long,
    )


def test_blocks_that_are_missing_are_named(tokenizer: Path, pairs: Path, tmp_path: Path) -> None:
    manifest = data.prepare(request(tokenizer, path=str(pairs), packing=True), tmp_path / "out")
    fewer = manifest.train.model_copy(update={"blocks": 1})
    manifest.model_copy(update={"train": fewer}).write(tmp_path / "out" / "manifest.json")
    with pytest.raises(
        DataError, match=r"out: \d+ train blocks, but the manifest has 1; prepare the data again"
    ):
        data.load(tmp_path / "out", "train")


# Batches.


def test_batches_of_packed_rows_have_one_shape_and_no_mask() -> None:
    batch = Collator(9, 8)([row([5, 6, 7], [3, 4]), row([1, 2])])
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7, 3, 4, 9, 9, 9], [1, 2, 9, 9, 9, 9, 9, 9]],
        "labels": [[-100, 6, 7, -100, 4, -100, -100, -100], [-100, 2, -100, -100, -100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]],
    }
    assert tokens_of(batch).item() == 7


def test_flattened_batches_tell_flash_attention_where_samples_begin() -> None:
    rows = [row([5, 6, 7], [3, 4]), row([1, 2, 3, 4], [1, 2, 3, 4])]
    batch, flat = Collator(9, 8)(rows), Collator(9, 8, flatten=True)(rows)
    for name in ("input_ids", "labels", "position_ids"):
        assert flat[name].tolist() == [batch[name].flatten().tolist()]
    assert flat["cu_seq_lens_q"].tolist() == flat["cu_seq_lens_k"].tolist() == [0, 3, 5, 8, 12, 16]
    assert (flat["max_length_q"], flat["max_length_k"], str(flat["cu_seq_lens_q"].dtype)) == (
        4,
        4,
        "torch.int32",
    )
    assert tokens_of(flat).item() == 13


def test_unpacked_rows_are_padded_as_trl_pads_them() -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = [alone([5, 6, 7]), alone([1, 2, 3, 4, 5])]
    ours, theirs = Collator(9, 8)(rows), DataCollatorForLanguageModeling(pad_token_id=9)(rows)
    assert {name: (tensor.tolist(), tensor.dtype) for name, tensor in ours.items()} == {
        name: (tensor.tolist(), tensor.dtype) for name, tensor in theirs.items()
    }
    assert tokens_of(ours).item() == 8


# Losses, of every type of model.

ALL_TYPES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODEL_TYPES]


@pytest.mark.parametrize("model_type", ALL_TYPES)
@pytest.mark.filterwarnings("ignore")
def test_the_table_says_under_which_attention_packed_samples_are_as_alone(model_type: str) -> None:
    known = model_types.table()[model_type]
    if "full" in known["problems"]:
        assert known["packing"] == []
        return
    assert known["packing"] == [
        attention for attention in ATTENTIONS if problem_of(model_type, attention) is None
    ]
    assert known["packing"] or known["problems"]["packing"]


@pytest.mark.parametrize("distance", [0.0, 1e-8, 3e-7, 3e-4, 2e-3, float("nan")])
def test_no_verdict_is_near_to_its_bound(distance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_samples, "distances", lambda *_, **__: {"one": 0.0, "other": distance})
    if 1e-7 < distance < 1e-3:
        with pytest.raises(
            packed_samples.Undecided, match=f"llama with sdpa: other: {distance:.1e}, neither 1e-07 nor 0.001"
        ):
            problem_of("llama", "sdpa")
    else:
        assert problem_of("llama", "sdpa") == (None if distance < 1e-7 else "other")


def without_positions(model: Any) -> Any:
    """Let a model attend across samples, as with an attention mask of ones."""
    forward = model.forward
    model.forward = lambda **batch: forward(
        **{name: value for name, value in batch.items() if name != "position_ids"}
    )
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "attention"),
    [("gpt_oss", "eager"), ("bloom", "eager"), ("lfm2", "sdpa"), ("mamba", "eager"), ("jamba", "sdpa")],
)
def test_masks_without_positions_convolutions_and_states_of_recurrent_layers_are_found(
    model_type: str, attention: str
) -> None:
    assert problem_of(model_type, attention) == "packed samples see each other"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packable_model_that_is_not_told_the_positions_is_found(attention: str) -> None:
    assert problem_of("llama", attention) is None
    assert (
        problem_of("llama", attention, without_positions(tiny_model("llama", attention)))
        == "packed samples see each other"
    )


@pytest.mark.filterwarnings("ignore")
def test_a_convolution_alone_is_found_to_see_the_sample_before() -> None:
    config = packed_samples.tiny_config("lfm2")
    config.layer_types = ["conv"] * config.num_hidden_layers
    model = tiny_model("lfm2", "eager", config)
    assert problem_of("lfm2", "eager", model) == "packed samples see each other"
    for layer in model.model.layers:
        layer.conv.conv.weight.data[..., :-1] = 0
    # The taps that are 0 have gradients all the same, from both samples.
    assert problem_of("lfm2", "eager", model) == "packed samples have other gradients than alone"


def test_refusals() -> None:
    def refusal(name: str, attention: str = "sdpa", trust_remote_code: bool = False) -> str | None:
        return model_types.packing_problem(name, attention, trust_remote_code)

    assert refusal("llama") is refusal("llama", "eager") is refusal("llama", "flash_attention_3") is None
    assert refusal("gemma4_text") is refusal("gemma4_unified_text") is refusal("gemma4_unified") is None
    assert refusal("lfm2") == "lfm2 with sdpa: packed samples see each other; leave packing out"
    assert refusal("hrm_text") is None
    assert str(refusal("hrm_text", "flash_attention_2")).endswith(
        "set model.attn_implementation to sdpa, or leave packing out"
    )
    assert (
        refusal("other")
        == "no test shows that packed samples of other do not see each other; leave packing out"
    )
    assert refusal("llama", trust_remote_code=True) == (
        "model.trust_remote_code: whether code of the model's own keeps packed samples apart is not known"
    )


# One step of the real trainer.


def step(
    base: Path, rows: list[dict[str, Any]], per_device: int, attention: str, out: Path
) -> tuple[float, float, int]:
    """Loss and gradient norm of one optimizer step over all `rows`, and its tokens."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    counted = []

    class Counting(SFTTrainer):  # type: ignore[misc]
        def get_batch_samples(self, *args: Any) -> Any:
            batches, items = super().get_batch_samples(*args)
            counted.append(int(self.accelerator.gather(sum(tokens_of(batch) for batch in batches)).sum()))
            return batches, items

    args = SFTConfig(
        output_dir=str(out),
        max_steps=1,
        per_device_train_batch_size=per_device,
        use_cpu=True,
        bf16=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        max_grad_norm=1e9,
        activation_checkpointing=True,
        disable_tqdm=True,
    )
    args.gradient_accumulation_steps = len(rows) // (per_device * args.world_size)
    model = AutoModelForCausalLM.from_pretrained(str(base), attn_implementation=attention)
    trainer = Counting(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(str(base)),
        data_collator=Collator(0, LENGTH),
    )
    trainer.train()
    [logs] = [logs for logs in trainer.state.log_history if "grad_norm" in logs]
    return logs["loss"], logs["grad_norm"], counted[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_step_on_packed_rows_is_the_step_on_their_samples(attention: str, tmp_path: Path) -> None:
    base = tiny_base(tmp_path)
    draw = random.Random(1)
    documents = [[draw.randrange(4, 400) for _ in range(size)] for size in (20, 31, 17, 40, 9, 50, 3, 60)]
    # Prompts of different lengths, so that a mean over rows would not be the mean over tokens.
    labels = [
        [IGNORED] * (len(ids) // part) + ids[len(ids) // part :]
        for ids, part in zip(documents, [2, 3, 4, 5] * 2, strict=True)
    ]
    blocks = [(0, 1), (2, 3), (4, 5), (6, 7)]
    packed = [
        row(documents[left], documents[right]) | {"labels": labels[left] + labels[right]}
        for left, right in blocks
    ]
    single = [{"input_ids": ids, "labels": label} for ids, label in zip(documents, labels, strict=True)]

    expected = ranks.run(1, step, base, single, 8, attention, tmp_path / "a")
    assert expected[2] == sum(len(document) for document in documents)
    for world_size, per_device in ((1, 4), (1, 1), (2, 1)):
        loss, norm, tokens = ranks.run(world_size, step, base, packed, per_device, attention, tmp_path / "b")
        assert (loss, norm) == pytest.approx(expected[:2], rel=1e-5)
        assert tokens == expected[2]


def test_report_and_card_say_what_the_samples_were_packed_into() -> None:
    recipe = recipe_for(Path("models/base"), "lora")
    parts = {
        split: [Shard(file="a", samples=1300, tokens=126_720, sha256="a")] for split in ("train", "heldout")
    }
    plain = manifest([{"input_ids": [0] * 20}], parts)
    packed = plain.model_copy(update={"train": plain.train.model_copy(update={"blocks": 1000})})
    for found, is_packed in ((plain, False), (packed, True)):
        made = run_of(recipe, found)
        assert ("1,000 blocks, 99 % of them samples" in page.render(*made, broken=[])) is is_packed
        shown = model_card.render(*made, broken=[])
        assert (
            "1,300 for training (packed into 1,000 blocks of 128 tokens), 1,300 held out" in shown
        ) is is_packed
        assert ("blocks:" in shown, "samples:" in shown) == (is_packed, not is_packed)
