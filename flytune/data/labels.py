"""Texts to input_ids and labels, by the characters of each token."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from flytune.data.chat_template import Span
from flytune.data.control_tokens import ControlTokens
from flytune.data.formats import Tokens
from flytune.data.render import Rendered
from flytune.errors import DataError
from flytune.models.scoring import IGNORED
from flytune.sentences import counted

Encoded = tuple[list[int], list[int]]
"""input_ids and labels, equally long."""


def encode(
    batch: Sequence[Rendered],
    tokenizer: Any,
    add_bos_token: bool | None = None,
    add_eos_token: bool = True,
    controls: ControlTokens | None = None,
) -> Iterator[Encoded]:
    """Tokenize each complete text once, and label its tokens; nothing is cut.

    `add_bos_token` and `add_eos_token` are those of the recipe, for raw text; `controls` tokenizes renamed
    texts.

    A token is trained if any of its characters is. So is a token across the boundary between prompt and
    completion (a merge of the last characters of the one with the first of the other): otherwise the
    completion's first characters would never be trained. The first token of a text is never trained: no token
    precedes it that could predict it. All texts of a batch must agree on `add_special_tokens`.
    """
    is_raw = batch[0].add_special_tokens
    adds = is_raw and add_bos_token is not False
    # The fast tokenizer itself: the lists that transformers makes of its output take another third of the
    # time.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    texts = [sample.text for sample in batch if not sample.is_renamed]
    plain = iter(backend.encode_batch(texts, add_special_tokens=adds))
    renamed: Iterator[Any] = iter(())
    ids_of: dict[int, int] = {}
    if controls is not None:
        encodings, ids_of = controls.encodings([sample.text for sample in batch if sample.is_renamed], adds)
        renamed = iter(encodings)
    for sample in batch:
        if sample.is_renamed:
            encoding = next(renamed)
            ids = [ids_of.get(token, token) for token in encoding.ids]
        else:
            encoding = next(plain)
            ids = encoding.ids
        ids, labels = _labelled(sample, encoding, ids, tokenizer, add_eos_token or not is_raw)
        if is_raw and add_bos_token and ids[:1] != [tokenizer.bos_token_id]:
            ids, labels = [tokenizer.bos_token_id, *ids], [IGNORED, *labels]
        if labels:
            labels[0] = IGNORED
        yield ids, labels


def cut_before_end(ids: list[int], labels: list[int], length: int) -> Encoded:
    """Return a sequence of at most `length` tokens that ends with its last one, the end token."""
    if len(ids) <= length:
        return ids, labels
    return [*ids[: length - 1], ids[-1]], [*labels[: length - 1], labels[-1]]


def validated(tokens: Tokens, vocabulary: int, where: str, completion_only: bool = True) -> Encoded:
    """Return a sample that was tokenized elsewhere, without its padding; nothing is appended.

    Without labels and masks all its tokens are trained, and without `completion_only` whatever the masks of
    completions say.

    Raises:
        DataError: a token is not in a vocabulary of this size, or the labels and masks do not belong to the
            tokens.
    """
    ids = _integers(tokens.input_ids, "input_ids", where)
    labels = ids if tokens.labels is None else _integers(tokens.labels, "labels", where)
    if tokens.masks:
        ids, labels = _masked(ids, labels, tokens, where, completion_only)
    for index, token in enumerate(ids):
        if not 0 <= token < vocabulary:
            raise DataError(
                f"{where}: input_ids[{index}] is {token}, but the tokenizer has tokens 0 to "
                f"{vocabulary - 1}; was the data tokenized for another model?"
            )
    if len(labels) != len(ids):
        raise DataError(
            f"{where}: {len(ids)} input_ids but {counted(len(labels), 'label')}; there must be a label for "
            "each token"
        )
    for index, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORED, token):
            raise DataError(
                f"{where}: labels[{index}] is {label}, but input_ids[{index}] is {token}; a label is "
                f"{IGNORED} (not trained) or the token at the same position: the loss shifts the labels, the "
                "data must not"
            )
    return list(ids), [IGNORED, *labels[1:]]


def _masked(ids: list[int], labels: list[int], tokens: Tokens, where: str, completion_only: bool) -> Encoded:
    """Return tokens without padding, and labels of those that the masks train."""
    masks = {name: _integers(mask, name, where) for name, mask in tokens.masks.items()}
    for name, mask in [("labels", labels), *masks.items()]:
        if len(mask) != len(ids):
            raise DataError(
                f"{where}: {len(ids)} input_ids but {len(mask)} in {name}; there must be one for each token"
            )
        if name in masks and not set(mask) <= {0, 1}:
            wrong = next(value for value in mask if value not in (0, 1))
            raise DataError(f"{where}: {name} must be of 0 and 1, found {wrong}")
    first, end = _attended(masks.pop("attention_mask", [1] * len(ids)), where)
    if not completion_only:
        return ids[first:end], labels[first:end]
    for name, mask in masks.items():
        contradicting = [index for index in range(first, end) if not mask[index] and labels[index] != IGNORED]
        if tokens.labels is not None and contradicting:
            index = contradicting[0]
            raise DataError(
                f"{where}: labels[{index}] is trained, but {name}[{index}] is 0; remove one of the two "
                "columns"
            )
        labels = [label if trained else IGNORED for label, trained in zip(labels, mask, strict=True)]
    return ids[first:end], labels[first:end]


def _attended(mask: list[int], where: str) -> tuple[int, int]:
    """Return the tokens [first, end) that an attention mask leaves between the padding of both ends."""
    if 1 not in mask:
        gap = "everywhere"
    else:
        first, end = mask.index(1), len(mask) - mask[::-1].index(1)
        if 0 not in mask[first:end]:
            return first, end
        gap = "between tokens that it attends to"
    raise DataError(
        f"{where}: attention_mask is 0 {gap}; only padding before or after a sample can be removed"
    )


def _integers(value: Any, name: str, where: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise DataError(
            f"{where}: {name} must be a list of integers, found {type(value).__name__} {value!r:.60}"
        )
    return value


def _labelled(rendered: Rendered, encoding: Any, ids: list[int], tokenizer: Any, ends: bool) -> Encoded:
    """Return tokens and labels, the first token's included; `ends` is whether a text without an end marker
    gets EOS."""
    labels = [IGNORED] * len(ids)
    for first, last in token_ranges(encoding, rendered.spans):
        labels[first:last] = ids[first:last]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id

    def is_added(token: int) -> bool:
        """Return whether the tokenizer has added a token, which then has no characters."""
        return encoding.token_to_chars(token) in (None, (0, 0))

    # The text may already begin with a BOS.
    if bos is not None and ids[:2] == [bos, bos] and is_added(0):
        ids, labels = ids[1:], labels[1:]
    is_question = rendered.add_special_tokens and not rendered.append_eos
    if not ends or is_question:
        if ids[-1:] == [eos] and is_added(len(encoding) - 1):
            return ids[:-1], labels[:-1]
        return ids, labels
    if rendered.append_eos and ids[-1:] != [eos]:
        ids, labels = [*ids, eos], [*labels, IGNORED]
    if rendered.append_eos and rendered.spans:
        labels[-1] = eos
    return ids, labels


def token_ranges(encoding: Any, spans: list[Span]) -> Iterator[tuple[int, int]]:
    """Yield for each span of characters the tokens [first, last) of a `tokenizers.Encoding` that have one of
    them.

    Byte-level BPE may leave spaces out of a token's characters (trim_offsets): they belong to the token that
    follows, which may have no others. One character may have several tokens (its bytes).
    """
    chars_of = encoding.token_to_chars
    begin, count = 0, len(encoding)
    while begin < count and chars_of(begin) is None:  # tokens that the tokenizer adds have no characters
        begin += 1
    while count > begin and chars_of(count - 1) is None:
        count -= 1
    ends = [stop for _, stop in encoding.offsets[begin:count]]

    def token_from(position: int) -> int:
        """Return the first token of the character at `position`, or of the next character that has one."""
        return begin + bisect_right(ends, position)

    def end(token: int) -> int:
        return int(chars_of(token)[1]) if token >= begin else 0

    def start(token: int) -> int:
        return min(chars_of(token)[0], end(token - 1))

    def is_part_of_rest(token: int, position: int) -> bool:
        """Return whether a token ends behind `position`, or is an empty one there."""
        return end(token) > position or end(token) == position == start(token)

    for low, high in spans:
        first = token_from(low)
        while first > begin and is_part_of_rest(first - 1, low):
            first -= 1
        last = max(first, token_from(high))
        while last > first and start(last - 1) >= high:
            last -= 1
        while last < count and start(last) < high:
            last += 1
        yield first, last
