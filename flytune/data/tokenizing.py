"""Texts to input_ids and labels, by the characters that each token stands for."""

from collections.abc import Iterator, Sequence
from typing import Any

from flytune.data.rendering import Rendered, Span

IGNORED = -100
"""The label of a token that is not trained."""

Encoded = tuple[list[int], list[int]]
"""input_ids and labels, equally long."""


def encode(batch: Sequence[Rendered], tokenizer: Any) -> Iterator[Encoded]:
    """Tokenizes each text once, as a whole, and labels its tokens; nothing is cut.

    A token is trained if any of its characters is: one that straddles the border between prompt and completion (a merge of the
    last characters of the one with the first of the other) is trained, else the completion's first characters never
    would be. The first token of a text never is: nothing stands before it that could predict it.
    All texts of a batch must agree on `add_special_tokens`.
    """
    encoding = tokenizer(
        [rendered.text for rendered in batch],
        add_special_tokens=batch[0].add_special_tokens,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    for rendered, ids, offsets in zip(batch, encoding["input_ids"], encoding["offset_mapping"], strict=True):
        yield _labelled(rendered, ids, offsets, tokenizer.eos_token_id)


def _labelled(rendered: Rendered, ids: list[int], offsets: list[Span], eos: int) -> Encoded:
    if rendered.append_eos and ids[-1:] != [eos]:
        ids, offsets = [*ids, eos], [*offsets, (0, 0)]
    labels = [IGNORED] * len(ids)
    for index in _inside(offsets, rendered.spans):
        labels[index] = ids[index]
    if rendered.append_eos and rendered.spans:
        labels[-1] = eos
    labels[:1] = [IGNORED] * len(labels[:1])
    return ids, labels


def _inside(offsets: list[Span], spans: list[Span]) -> Iterator[int]:
    """The tokens with a character in one of the spans, which are in order."""
    remaining = iter(spans)
    low, high = next(remaining, (0, 0))
    reached = 0
    for index, (start, end) in enumerate(offsets):
        # Byte-level BPE may leave spaces out of the offsets (trim_offsets): they belong to the token that follows.
        if start > reached:
            start = reached
        if end > reached:
            reached = end
        while start >= high and high > low:
            low, high = next(remaining, (0, 0))
        if (start < high and end > low) or (start == end and low <= start < high):
            yield index
