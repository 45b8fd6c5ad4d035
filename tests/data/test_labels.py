"""Which tokens have which characters, beside a plain look at each token."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flytune.data.labels import token_ranges
from tests.support.chats import byte_level

TEXTS = [
    "The fox  jumps\n\n   over 日本 the 🦊 dog's  ",
    "  lead",
    "\n\n \t x",
    "é́a  b   ",
    "<s>hi</s>  <s> yo </s>",
]


def tokenizers_of() -> dict[str, Any]:
    """Fast tokenizers of the kinds that models have, trained on a few words."""
    from tokenizers import Tokenizer, models, normalizers, processors, trainers

    special = ["<unk>", "<s>", "</s>"]
    made = {}
    for name, trim in (("bytes", False), ("bytes trimmed", True)):
        level = byte_level(TEXTS * 3, 320, special, adds_space=trim)
        level.post_processor = processors.ByteLevel(trim_offsets=trim)
        made[name] = level
    pieces = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special + bytes_of, limit_alphabet=30, show_progress=False
    )
    pieces.train_from_iterator(TEXTS[:1], trainer)
    pieces.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made["pieces"] = pieces
    return made


TOKENIZERS = tokenizers_of()


def plainly(encoding: Any, low: int, high: int) -> list[int]:
    """The tokens with a character in [low, high), each looked at."""
    reached, found = 0, []
    for index, (start, end) in enumerate(encoding.offsets):
        if encoding.token_to_chars(index) is None:
            continue
        start, reached = min(start, reached), max(end, reached)
        if (start < high and end > low) or (start == end and low <= start < high):
            found.append(index)
    return found


@given(st.one_of(st.sampled_from(TEXTS), st.text(alphabet="aefox 日🦊\n\t<s>/é", max_size=40)), st.data())
@settings(max_examples=400)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_between_characters_are_those_that_a_look_at_each_finds(
    name: str, text: str, data: st.DataObject
) -> None:
    low = data.draw(st.integers(0, len(text)))
    high = data.draw(st.integers(low, len(text)))
    if low == high:
        return
    for adds in (False, True):
        encoding = TOKENIZERS[name].encode(text, add_special_tokens=adds)
        assert list(range(*next(token_ranges(encoding, [(low, high)])))) == plainly(encoding, low, high), (
            encoding.offsets,
            low,
            high,
        )
