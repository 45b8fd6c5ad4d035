"""Samples of prepared data token by token: those that were dropped, cut or flagged, the longest, and the
first ones."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from flytune.data import StoredSamples, row_kind
from flytune.data.contract import Contract
from flytune.data.counts import Example, Excerpt, read_examples
from flytune.data.stored_samples import parts
from flytune.models import images
from flytune.records import Manifest
from flytune.report.pictures import Pictures, Shown
from flytune.sentences import counted

_SEARCHED = 2000
"""Number of first samples in which the longest is searched."""
_HEAD, _TAIL = 360, 120
"""Numbers of first and last tokens that are shown of a longer sample."""
_VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍"})
_LOCATION = re.compile(r"(?P<split>train|heldout)/\S+\.parquet row (?P<row>\d+)(?=: )")
_TITLES = {
    "dropped, too long": "Dropped, too long",
    "dropped, without an answer": "Dropped, without a trained token",
    "cut": "Cut",
}
"""Titles of examples by their kinds, in their order on the page."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, or of several tokens that share a character."""

    text: str
    kind: str = ""
    """CSS classes: t trained, s special, c the end of a cut sample, l lost behind it; or `gap`."""
    tip: str = ""
    breaks: bool = False
    """True if it ends with a line break."""
    picture: str = ""
    """Address of the picture that it is."""


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample on the page."""

    title: str
    note: str
    pieces: list[Piece]
    """Tokens of the sample; of a row of several sequences, the tokens that all begin with."""
    sequences: tuple[tuple[str, list[Piece]], ...] = ()
    """Name and tokens of each sequence of such a row (a pair's chosen and rejected one) from the place where
    they part."""


def sample_views(
    folder: Path, manifest: Manifest, tokenizer: Any, count: int, contract: Contract | None = None
) -> list[SampleView]:
    """Return the samples to look at, each once: dropped rows, cut ones, those that checks of `contract` flag,
    the longest of the first _SEARCHED training samples, and the first `count`."""
    shown = [_example_view(example, manifest, tokenizer) for example in _examples(folder, max(1, count // 2))]
    titled = _flagged(folder, manifest, contract, tokenizer) if contract else {}
    titled |= _stored(folder, manifest, count, has_cut=any(view.title == _TITLES["cut"] for view in shown))
    # A sample with several titles is shown once, under the first.
    titles: dict[tuple[str, int, int], list[str]] = {}
    for title, (part, sample) in titled.items():
        titles.setdefault((part.file, int(part.rows[sample]), int(part.starts[sample])), []).append(title)
    kind = row_kind(manifest.row_kind, manifest.negatives)
    pictures = Pictures(folder) if (folder / images.FOLDER).is_dir() else None
    for named in titles.values():
        part, sample = titled[named[0]]
        title = "; ".join(named)
        if kind.sequences == 1:
            shown.append(_view(title, part, sample, manifest, tokenizer, pictures))
        else:
            shown.append(_view_of_several(title, part, sample, manifest, tokenizer))
    return shown


def _examples(folder: Path, most: int) -> list[Example]:
    kept = read_examples(folder)
    return [
        example
        for kind in _TITLES
        for example in [example for example in kept if example.kind == kind][:most]
    ]


def _stored(
    folder: Path, manifest: Manifest, count: int, has_cut: bool
) -> dict[str, tuple[StoredSamples, int]]:
    """Return samples by their titles: one that may have been cut (where no example of it was kept), the
    longest, the first."""
    first: dict[str, tuple[StoredSamples, int]] = {}
    cut: tuple[StoredSamples, int] | None = None
    longest: tuple[StoredSamples, int] | None = None
    seen = most = 0
    # The sequences of a row are samples that follow one another.
    kind = row_kind(manifest.row_kind, manifest.negatives)
    per_row, name = kind.sequences, kind.title
    for part in parts(folder, manifest.train):
        lengths = part.lengths.tolist()
        for sample in range(0, len(lengths), per_row):
            group = range(sample, sample + per_row)
            length = sum(lengths[number] for number in group)
            if seen < count:
                first[f"{name} {seen + 1}"] = part, sample
            if length > most:
                longest, most = (part, sample), length
            if (
                not cut
                and manifest.truncated
                and any(_may_be_cut(part, number, manifest) for number in group)
            ):
                cut = part, sample
            seen += 1
        if seen >= _SEARCHED:
            break
    cut_sample = {"An answer that may have been cut": cut} if not has_cut else {}
    return {
        title: place
        for title, place in {**cut_sample, f"Longest {name.lower()}": longest, **first}.items()
        if place
    }


def _flagged(
    folder: Path, manifest: Manifest, contract: Contract, tokenizer: Any
) -> dict[str, tuple[StoredSamples, int]]:
    """Return the sample that each failed check and each warning names."""
    wanted: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for check in contract.checks:
        if check.verdict != "ok" and (place := _LOCATION.match(check.example)):
            wanted.setdefault((place[0].split(" row ")[0], int(place["row"])), []).append(
                (check.name, check.example)
            )
    flagged: dict[str, tuple[StoredSamples, int]] = {}
    files = {file for file, _ in wanted}
    for counts in (manifest.train, manifest.heldout):
        few = counts.model_copy(update={"shards": [shard for shard in counts.shards if shard.file in files]})
        for part in parts(folder, few):
            rows: dict[int, list[int]] = {}
            for sample, row in enumerate(part.rows.tolist()):
                if (part.file, row) in wanted:
                    rows.setdefault(row, []).append(sample)
            for row, samples in rows.items():
                for name, example in wanted[part.file, row]:
                    # Of a block, the sample whose end is the excerpt; of a row of several sequences, all.
                    ends = [sample for sample in samples if _ends_with(part, sample, example, tokenizer)]
                    at = (
                        0
                        if row_kind(manifest.row_kind, manifest.negatives).sequences > 1
                        else samples.index((ends or samples)[0])
                    )
                    flagged[f"Flagged: {name}"] = part, samples[at]
    return flagged


def _ends_with(part: StoredSamples, sample: int, example: str, tokenizer: Any) -> bool:
    known = [number for number in part.tokens(sample)[-60:].tolist() if 0 <= number < len(tokenizer)]
    text = str(tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return example.endswith(repr(text[-60:]))


def _example_view(example: Example, manifest: Manifest, tokenizer: Any) -> SampleView:
    """Return a row that was dropped or cut, with what was lost."""
    pieces = [
        list(_excerpt_pieces(sequence, manifest.max_length, tokenizer)) for sequence in example.sequences
    ]
    *first, last = [sequence.tokens for sequence in example.sequences]
    tokens = " and ".join([*(f"{count:,}" for count in first), counted(last, "token")])
    names = row_kind(manifest.row_kind, manifest.negatives).sequence_names
    lost = sum(max(0, sequence.tokens - manifest.max_length) for sequence in example.sequences)
    note = f"{example.where}: {tokens}"
    if example.kind == "cut":
        note += f", of which {lost:,} were cut off"
    elif lost:
        note += f", of which {lost:,} are beyond max_length {manifest.max_length:,}"
    if example.kind == "dropped, without an answer":
        note += "; no token that is trained is left"
    if len(pieces) == 1:
        return SampleView(_TITLES[example.kind], note, pieces[0])
    return SampleView(_TITLES[example.kind], note, [], tuple(zip(names, pieces, strict=True)))


def _excerpt_pieces(excerpt: Excerpt, max_length: int, tokenizer: Any) -> Iterator[Piece]:
    at = 0
    for window in excerpt.windows:
        if window.start > at:
            yield Piece(f"{counted(window.start - at, 'token is', 'tokens are')} not shown", "gap")
        cut = min(max(0, max_length - window.start), len(window.ids))
        yield from _pieces(window.ids[:cut], window.trained[:cut], tokenizer, window.start)
        at = window.start + len(window.ids)
        if cut < len(window.ids):
            if cut or window.start == max_length:
                yield Piece(f"cut at {counted(max_length, 'token')}", "c")
            for piece in _pieces(
                window.ids[cut:], [False] * (len(window.ids) - cut), tokenizer, window.start + cut
            ):
                yield Piece(piece.text, "l", piece.tip, piece.breaks)


def _may_be_cut(part: StoredSamples, sample: int, manifest: Manifest) -> bool:
    length = int(part.lengths[sample])
    return length == manifest.max_length and bool(part.trained[part.starts[sample] + length - 1])


def _trained(trained: list[bool], manifest: Manifest) -> str:
    """Return the number of trained tokens; nothing of data none of whose tokens is predicted."""
    return f", {sum(trained):,} trained" if manifest.train.trained_tokens else ""


def _view_of_several(
    title: str, part: StoredSamples, sample: int, manifest: Manifest, tokenizer: Any
) -> SampleView:
    """Return a row of several sequences: what all begin with once, then side by side from where they part."""
    names = row_kind(manifest.row_kind, manifest.negatives).sequence_names
    sequences = []
    for number in range(sample, sample + len(names)):
        start, length = int(part.starts[number]), int(part.lengths[number])
        sequences.append((part.tokens(number).tolist(), part.trained[start : start + length].tolist()))
    tokens = zip(*(ids for ids, _ in sequences), strict=False)
    shared = sum(1 for _ in takewhile(lambda place: len({*place}) == 1, tokens))
    sizes = [
        f"{name} {counted(len(ids), 'token')}{_trained(trained, manifest)}"
        for name, (ids, trained) in zip(names, sequences, strict=True)
    ]
    note = f"{part.where(sample)}: {'; '.join(sizes)}; they part after {shared:,}"
    first, trained_of_first = sequences[0]
    before = _shortened(first[:shared], trained_of_first[:shared], tokenizer)
    shown = []
    for name, (ids, trained) in zip(names, sequences, strict=True):
        pieces = list(_pieces(ids[: shared + _HEAD], trained, tokenizer, 0, shared))
        if (rest := len(ids) - shared - _HEAD) > 0:
            pieces.append(Piece(f"{counted(rest, 'token is', 'tokens are')} not shown", "gap"))
        if manifest.truncated and len(ids) == manifest.max_length:
            pieces.append(Piece(f"cut at {counted(manifest.max_length, 'token')}", "c"))
        shown.append((name, pieces))
    return SampleView(title, note, before, tuple(shown))


def _view(
    title: str,
    part: StoredSamples,
    sample: int,
    manifest: Manifest,
    tokenizer: Any,
    pictures: Pictures | None,
) -> SampleView:
    start, length = int(part.starts[sample]), int(part.lengths[sample])
    ids, trained = part.tokens(sample).tolist(), part.trained[start : start + length].tolist()
    note = f"{part.where(sample)}: {counted(length, 'token')}{_trained(trained, manifest)}"
    if part.desirable is not None:
        note += f", {row_kind(manifest.row_kind).label_names[bool(part.desirable[sample])]}"
    if part.classes is not None:
        names = [manifest.classes[place] for place in part.classes[sample]]
        note += f", {', '.join(names) or 'without a label'}"
    if pictures is None or part.images is None:
        pieces = _shortened(ids, trained, tokenizer)
    else:
        shown = pictures.of_sample(part.images[sample])
        note += f", {counted(len(shown), 'image')}"
        pieces = _without_middle(list(_pictured(ids, trained, tokenizer, shown, pictures.token_ids)))
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    if manifest.truncated and length == manifest.max_length and not special & set(ids[-2:]):
        pieces.append(Piece(f"cut at {counted(manifest.max_length, 'token')}", "c"))
    return SampleView(title, note, pieces)


def _shortened(ids: list[int], trained: list[bool], tokenizer: Any) -> list[Piece]:
    """Return the pieces of a sequence, with a gap in a long one."""
    length = len(ids)
    if length <= _HEAD + _TAIL:
        return list(_pieces(ids, trained, tokenizer, 0))
    gap = Piece(
        f"{counted(length - _HEAD - _TAIL, 'token')}, {sum(trained[_HEAD:-_TAIL]):,} of them trained, are "
        "not shown",
        "gap",
    )
    tail = _pieces(ids[-_TAIL:], trained[-_TAIL:], tokenizer, length - _TAIL)
    return [*_pieces(ids[:_HEAD], trained[:_HEAD], tokenizer, 0), gap, *tail]


def _pictured(
    ids: list[int], trained: list[bool], tokenizer: Any, shown: list[Shown], token_ids: frozenset[int]
) -> Iterator[Piece]:
    """Yield the pieces of a sample: each picture, before one piece for the tokens that stand for it."""
    # Pictures to come, and tokens to come of the last one.
    coming, left = iter(shown), 0
    for is_image, run in groupby(range(len(ids)), lambda place: ids[place] in token_ids):
        start, *others = run
        end = start + 1 + len(others)
        if not is_image:
            yield from _pieces(ids[:end], trained, tokenizer, 0, start)
            continue
        while start < end:
            if not left:
                picture = next(coming)
                left = picture.tokens
                yield Piece(picture.caption, "p", picture.caption, picture=picture.source)
            count = min(left, end - start)
            token = tokenizer.convert_ids_to_tokens(ids[start])
            yield Piece(f"{token}\u00a0x\u00a0{count:,}", "s", f"{start}: {ids[start]}")
            start, left = start + count, left - count


def _without_middle(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces of a sample, with a gap where it has many."""
    hidden = len(pieces) - _HEAD - _TAIL
    if hidden <= 0:
        return pieces
    gap = Piece(f"{counted(hidden, 'piece is', 'pieces are')} not shown", "gap")
    return [*pieces[:_HEAD], gap, *pieces[-_TAIL:]]


def _pieces(
    ids: list[int], trained: list[bool], tokenizer: Any, first: int, start: int = 0
) -> Iterator[Piece]:
    """Yield a piece for each token from `start` on, and one piece for tokens that share a character (its
    bytes)."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}

    def text_of(numbers: list[int]) -> str:
        return str(tokenizer.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    for end in range(start + 1, len(ids) + 1):
        # Decode with the previous token: some tokenizers drop the space at the beginning of a text.
        before = ids[max(0, start - 1) : start]
        text = text_of(before + ids[start:end])[len(text_of(before)) :]
        if text.endswith("\ufffd") and end - start < 4 and end < len(ids):
            continue
        is_special = end - start == 1 and ids[start] in special
        kind = " ".join(name for name, holds in (("t", any(trained[start:end])), ("s", is_special)) if holds)
        tip = f"{first + start}: {' '.join(str(number) for number in ids[start:end])}"
        lines = text.translate(_VISIBLE).replace("↵", "↵\n")
        yield Piece(lines.removesuffix("\n") or "∅", kind, tip, text.endswith("\n"))
        start = end
