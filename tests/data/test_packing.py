"""Packing: every sample once and whole, and training that cannot tell packed samples from samples alone."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flytune import data
from flytune.data import Collator, pack, packing, shards, tokens_of
from flytune.data.collator import IGNORED, PACKABLE, refusal
from flytune.data.packing import Window
from flytune.errors import DataError
from flytune.records import Manifest, Shard
from flytune.report import model_card, page
from tests.support import ranks
from tests.support.chats import CHATML, request, stored, tokenizer_folder, write_rows
from tests.support.reports import metrics
from tests.support.stages import manifest, plan_for, recipe_for, training_result
from tests.support.tiny import tiny_base

LENGTH = 64
FAST = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"]
"""Mistral, Gemma 2 and 3 with a sliding window that is shorter than the samples."""


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
@settings(max_examples=200, deadline=None)
def test_every_sample_stands_in_one_block_and_blocks_are_as_few_as_best_fit_decreasing_makes_them(lengths: list[int]) -> None:
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
    window = Window(10)
    assert [list(window.add(([1] * 4, [1] * 4))) for _ in range(24)] == [[]] * 24
    assert [lengths for _, _, lengths in window.add(([2] * 4, [2] * 4))] == [[4, 4]] * 12 + [[4]]
    assert list(window.flush()) == []


# What prepare writes.


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), CHATML)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": f"ask {n}:", "completion": f" say {n}" * (n % 9)} for n in range(400)]
    return write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", rows)


def samples_of(rows: list[dict[str, list[int]]]) -> list[tuple[list[int], list[int]]]:
    """The samples of packed rows, by their seq_lengths."""
    samples = []
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"])
        start = 0
        for length in row["seq_lengths"]:
            samples.append((row["input_ids"][start : start + length], row["labels"][start : start + length]))
            start += length
    return samples


def test_prepare_packs_train_and_leaves_heldout_alone(
    tokenizer: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"path": str(pairs), "max_length": LENGTH, "too_long": "drop"}
    plain = data.prepare(request(tokenizer, **asked), tmp_path / "plain")
    monkeypatch.setattr(shards, "SAMPLES_A_SHARD", 20)
    monkeypatch.setattr(packing, "WINDOW_TOKENS", 2000)
    monkeypatch.setattr(packing, "WINDOW_BLOCKS", 2)
    packed, again = (data.prepare(request(tokenizer, packing=True, **asked), tmp_path / name) for name in ("packed", "again"))

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


def test_without_packing_the_manifest_does_not_speak_of_it(tokenizer: Path, pairs: Path, tmp_path: Path) -> None:
    manifest = data.prepare(request(tokenizer, path=str(pairs)), tmp_path / "out")
    assert "blocks" not in (tmp_path / "out" / "manifest.json").read_text()
    assert manifest.useful_share == 1


def test_blocks_that_are_missing_are_named(tokenizer: Path, pairs: Path, tmp_path: Path) -> None:
    manifest = data.prepare(request(tokenizer, path=str(pairs), packing=True), tmp_path / "out")
    fewer = manifest.train.model_copy(update={"blocks": 1})
    manifest.model_copy(update={"train": fewer}).write(tmp_path / "out" / "manifest.json")
    with pytest.raises(DataError, match=r"out: \d+ train blocks, but the manifest has 1; prepare the data again"):
        data.load(tmp_path / "out", "train")


# Batches.


def row(*documents: list[int]) -> dict[str, list[int]]:
    """Documents as one packed row, trained on all tokens: the labels of first tokens too, which the collator must drop."""
    ids = [token for document in documents for token in document]
    return {"input_ids": ids, "labels": list(ids), "seq_lengths": [len(document) for document in documents]}


def alone(document: list[int]) -> dict[str, list[int]]:
    return {"input_ids": document, "labels": [IGNORED, *document[1:]]}


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
    assert (flat["max_length_q"], flat["max_length_k"], str(flat["cu_seq_lens_q"].dtype)) == (4, 4, "torch.int32")
    assert tokens_of(flat).item() == 13


def test_unpacked_rows_are_padded_as_trl_pads_them() -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = [alone([5, 6, 7]), alone([1, 2, 3, 4, 5])]
    ours, theirs = Collator(9, 8)(rows), DataCollatorForLanguageModeling(pad_token_id=9)(rows)
    assert {name: (tensor.tolist(), tensor.dtype) for name, tensor in ours.items()} == {
        name: (tensor.tolist(), tensor.dtype) for name, tensor in theirs.items()
    }
    assert tokens_of(ours).item() == 8


# Losses.

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": 96,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_num_experts": 4, "moe_k": 2, "n_group": 1, "topk_group": 1, "query_pre_attn_scalar": 16,
    "shared_expert_intermediate_size": 32, "first_k_dense_replace": 1, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "residual_dropout": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}  # fmt: skip


OPTIONAL = ("num_key_value_heads", "sliding_window")
"""None by default in some configurations that have them."""


def tiny_model(model_type: str, attention: str) -> Any:
    """A random model of that type, in training with activation checkpointing; None where it has no such attention."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    default = kind()
    sizes = {
        name: size
        for name, size in SIZES.items()
        if getattr(default, name, None) is not None or (name in OPTIONAL and hasattr(default, name))
    }
    torch.manual_seed(0)
    try:
        built = "eager" if attention == "flash_attention_2" else attention
        model = AutoModelForCausalLM.from_config(kind(**sizes), attn_implementation=built, dtype=torch.float32)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        return None
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Large weights: what a token attends to must show in the loss.
            torch.nn.init.normal_(parameter, std=0.15)
    for module in model.modules():
        if attention == "flash_attention_2" and hasattr(module, "config"):
            module.config._attn_implementation = attention
    model.train()
    model.gradient_checkpointing_enable()
    return model


def losses(model: Any, batch: dict[str, Any]) -> Any:
    """Of each trained token, in order."""
    from torch.nn.functional import cross_entropy

    labels = batch.pop("labels")[:, 1:].flatten()
    logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels, reduction="none")[labels != IGNORED]


def flash_attention_of_the_cpu(query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    """What the kernels compute; samples' borders come from the collator, or from the positions where a model drops those."""
    import torch
    from transformers import modeling_flash_attention_utils as flash

    index = torch.arange(query.shape[1])
    seen = index[:, None] >= index
    if options.get("sliding_window"):
        seen &= index[:, None] - index < options["sliding_window"]
    borders = options.get("cu_seq_lens_q")
    if borders is None and flash._is_packed_sequence(options.get("position_ids"), len(query)):
        borders = flash.prepare_fa_kwargs_from_position_ids(options["position_ids"])[0][0]
    if borders is not None:
        assert attention_mask is None
        sample = torch.bucketize(index, borders[1:], right=True)
        seen &= sample[:, None] == sample
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (options.get("softmax_scale") or query.shape[3] ** -0.5)
    if cap := options.get("softcap"):
        scores = torch.tanh(scores / cap) * cap
    return (scores.masked_fill(~seen, -1e30).softmax(-1) @ value).transpose(1, 2)


ALL_TYPES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in sorted(PACKABLE)]


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("model_type", ALL_TYPES)
@pytest.mark.filterwarnings("ignore")
def test_packed_samples_lose_what_they_lose_alone_and_none_sees_another(
    model_type: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformers.integrations.flash_attention as flash

    monkeypatch.setattr(flash, "_flash_attention_forward", flash_attention_of_the_cpu)
    model = tiny_model(model_type, attention)
    if model is None or (model_type == "gpt2" and attention == "flash_attention_2"):
        pytest.skip(f"transformers has no {attention} for {model_type} in float32")
    draw = random.Random(0)
    documents, others = ([[draw.randrange(3, 128) for _ in range(size)] for size in (20, 31, 17, 40)] for _ in range(2))
    collate = Collator(0, LENGTH, flatten=attention == "flash_attention_2")

    separate = [losses(model, collate([alone(document)])) for document in documents]
    torch.cat(separate).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    packed = losses(model, collate([row(*documents[:2]), row(*documents[2:])]))
    packed.sum().backward()
    assert (packed - torch.cat(separate)).abs().max() < 1e-5
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(after) == len(gradients)
    distance = torch.stack([(one - other).norm() for one, other in zip(after, gradients, strict=True)]).norm()
    assert distance / norm < 1e-5

    # Other neighbors, in front and behind: not one bit of the loss changes.
    changed = losses(model, collate([row(others[0], documents[1]), row(documents[2], others[3])]))
    kept = slice(19, 19 + 30 + 16)
    assert torch.equal(changed[kept], packed[kept])
    assert not torch.equal(changed[:19], packed[:19])


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_builds_its_mask_without_positions_leaks_and_is_refused() -> None:
    import torch

    model = tiny_model("gpt_oss", "eager")
    first, second, other = [5] * 20, list(range(10, 30)), [6] * 20
    left, right = (losses(model, Collator(0, LENGTH)([row(before, second)]))[19:] for before in (first, other))
    assert not torch.allclose(left, right, atol=1e-2)
    assert refusal("gpt_oss", False) == (
        "transformers masks the attention of gpt_oss without its positions: packed samples would see each other"
    )


def test_refusals() -> None:
    assert [refusal(name, False) for name in PACKABLE] == [None] * len(PACKABLE)
    assert refusal("qwen3_next", False) == (
        "qwen3_next has recurrent or convolution layers, which carry one packed sample over into the next"
    )
    assert refusal("other", False) == "no test shows that packed samples of other do not see each other"
    assert refusal("llama", True) == (
        "model.trust_remote_code: whether code of the model's own keeps packed samples apart is not known"
    )


# One step of the real trainer.


def step(base: Path, rows: list[dict[str, Any]], per_device: int, attention: str, out: Path) -> tuple[float, float, int]:
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
        output_dir=str(out), max_steps=1, per_device_train_batch_size=per_device, use_cpu=True, bf16=False, max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True}, report_to="none", logging_steps=1, save_strategy="no",
        max_grad_norm=1e9, activation_checkpointing=True, disable_tqdm=True,
    )  # fmt: skip
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
        [IGNORED] * (len(ids) // part) + ids[len(ids) // part :] for ids, part in zip(documents, [2, 3, 4, 5] * 2, strict=True)
    ]
    blocks = [(0, 1), (2, 3), (4, 5), (6, 7)]
    packed = [row(documents[left], documents[right]) | {"labels": labels[left] + labels[right]} for left, right in blocks]
    single = [{"input_ids": ids, "labels": label} for ids, label in zip(documents, labels, strict=True)]

    expected = ranks.run(1, step, base, single, 8, attention, tmp_path / "a")
    assert expected[2] == sum(len(document) for document in documents)
    for world_size, per_device in ((1, 4), (1, 1), (2, 1)):
        loss, norm, tokens = ranks.run(world_size, step, base, packed, per_device, attention, tmp_path / "b")
        assert (loss, norm) == pytest.approx(expected[:2], rel=1e-5)
        assert tokens == expected[2]


def test_report_and_card_say_what_the_samples_were_packed_into() -> None:
    recipe = recipe_for(Path("models/base"), "lora")
    parts = {split: [Shard(file="a", samples=1300, tokens=126_720, sha256="a")] for split in ("train", "heldout")}
    plain = manifest([{"input_ids": [0] * 20}], parts)
    packed = plain.model_copy(update={"train": plain.train.model_copy(update={"blocks": 1000})})
    for found, is_packed in ((plain, False), (packed, True)):
        made = recipe, plan_for(recipe), found, training_result(2), metrics()
        assert ("1,000 blocks, 99 % of them samples" in page.render(*made, broken=[])) is is_packed
        shown = model_card.render(*made, broken=[])
        assert ("1,300 for training (packed into 1,000 blocks of 128 tokens), 1,300 held out" in shown) is is_packed
        assert ("blocks:" in shown, "samples:" in shown) == (is_packed, not is_packed)
