"""Texts to input_ids and labels, by the characters that each token stands for."""

from collections.abc import Iterator, Sequence
from typing import Any

from flytune.data.formats import Tokens
from flytune.data.rendering import Rendered, Span
from flytune.errors import DataError

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
        yield _labelled(rendered, *_with_one_bos(ids, offsets, tokenizer.bos_token_id), tokenizer.eos_token_id)


def _with_one_bos(ids: list[int], offsets: list[Span], bos: int | None) -> tuple[list[int], list[Span]]:
    """Without the tokenizer's own BOS, which stands for no character, where the text begins with one already."""
    if bos is not None and ids[:2] == [bos, bos] and offsets[0][1] == 0:
        return ids[1:], offsets[1:]
    return ids, offsets


def checked(tokens: Tokens, vocabulary: int, where: str) -> Encoded:
    """A sample that was tokenized elsewhere; without labels all its tokens are trained. Nothing is appended.

    Raises:
        DataError: tokens that a vocabulary of that size does not have, or labels that do not belong to them.
    """
    ids = _integers(tokens.input_ids, "input_ids", where)
    labels = ids if tokens.labels is None else _integers(tokens.labels, "labels", where)
    if (place := next((place for place, token in enumerate(ids) if not 0 <= token < vocabulary), None)) is not None:
        raise DataError(
            f"{where}: input_ids[{place}] is {ids[place]}, but the tokenizer has tokens 0 to {vocabulary - 1}; "
            "was the data tokenized for another model?"
        )
    if len(labels) != len(ids):
        raise DataError(f"{where}: {len(ids)} input_ids but {len(labels)} labels; there must be a label for each token")
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORED, token):
            raise DataError(
                f"{where}: labels[{place}] is {label}, but input_ids[{place}] is {token}; a label is {IGNORED} "
                "(not trained) or the token at the same place: the loss shifts them, the data must not"
            )
    return list(ids), [IGNORED] * len(labels[:1]) + labels[1:]


def _integers(value: Any, name: str, where: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise DataError(f"{where}: {name} must be a list of integers, found {type(value).__name__} {value!r:.60}")
    return value


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
