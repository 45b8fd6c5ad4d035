"""Statistics of prepared data for the contract, counted in one pass over all samples."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from flytune.data.contract.duplicates import Hashes, earlier, new, signatures
from flytune.data.render import ChatTemplate
from flytune.data.rows import row_kind
from flytune.data.stored_samples import StoredSamples, parts
from flytune.records import Manifest

HASHES = 5_000_000
"""Samples whose hashes are kept, 8 bytes each; of more, a share is drawn by content, so that equal ones are
drawn together."""
NEAR_TOKENS = 2_000_000
"""Tokens of training samples that are searched for near duplicates; a quarter of it for held-out samples."""
TRIP_SAMPLES, TRIP_TOKENS = 256, 200_000
"""Approximate numbers of samples and tokens that are decoded and tokenized again."""
_SIZES = ("samples", "tokens")
_EXCERPT = 60
_SECOND = 0x9E3779B97F4A7C15
"""Odd factor that joins the hashes of a row's sequences, in their order; by the golden ratio (Knuth, TAOCP 3,
§6.4)."""
_MARKER = re.compile(r"<\|[A-Za-z_]+\|>")
_PROBES = ("The quick brown fox\n\tjumps  over 12 lazy dogs, doesn't it?", "{eos}\nHello {eos} there")


@dataclass(frozen=True)
class RoundTrip:
    """Counts of samples that were decoded and tokenized again."""

    tried: int
    failed: int
    by_tokens: bool
    """True if tokens are compared, False if texts are."""
    example: str


@dataclass(frozen=True)
class Duplicates:
    """Counts of samples that equal, or nearly equal, an earlier one, among the drawn samples."""

    train: int
    heldout: int
    equal: int
    overlap: int
    near_train: int
    near_heldout: int
    near: int
    near_overlap: int
    drawn: set[str]
    """Names of the checks that used only a share of the samples."""
    examples: dict[str, str] = field(default_factory=dict)


@dataclass
class _Split:
    """Counts and kept samples of one split."""

    near_share: float
    """Share of its samples that is searched for near duplicates."""
    examples: dict[str, str] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    hashes: Hashes = field(default_factory=lambda: Hashes(HASHES))
    trip: dict[int, tuple[str, Any] | None] = field(default_factory=dict)
    """Location and tokens of samples that will be tokenized again, by their hashes; None for those that were
    cut."""
    near: dict[int, Any] = field(default_factory=dict)
    """Tokens of samples that are searched for near duplicates, by their hashes."""


class Statistics:
    """Counts of a prepared data set, of both splits together unless noted."""

    def __init__(self, manifest: Manifest, tokenizer: Any, rows: int | None = None) -> None:
        """Begin to count the samples of a manifest; `rows` are the embedding's, where known."""
        kind, splits = row_kind(manifest.row_kind, manifest.negatives), (manifest.train, manifest.heldout)
        self._tokenizer, self._max_length, self._kind = tokenizer, manifest.max_length, kind
        self._rows = min(len(tokenizer), rows or len(tokenizer))
        self.bos, self.eos, self.pad = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token
        special = {
            number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        special[tokenizer.eos_token_id] = self.eos
        self.named = {token for token in (self.bos, self.eos, self.pad) if token}
        # The pad token is only used by its number.
        self.written = {token for token in (self.bos, self.eos) if token}
        is_chat = kind.has_template(set(manifest.format.split(", ")), tokenizer)
        self.template = ChatTemplate(tokenizer) if is_chat else None
        """The chat template of the samples, with whose marks answers end; None for other formats."""
        marks = (
            self.template.marks
            if self.template
            else {*special.values(), self.eos} - ({self.bos} - {self.eos})
        )
        self._marks = {
            number: str(token)
            for number, token in tokenizer.added_tokens_decoder.items()
            if str(token) in marks
        }
        self._marks[tokenizer.eos_token_id] = self.eos
        written = set(_MARKER.findall(tokenizer.get_chat_template())) if is_chat else set()
        # A token may begin with a mark: <|im_start|>user.
        written -= {
            mark for mark in written for token in special.values() if token != mark and token.startswith(mark)
        }
        tested = sorted(self.named | set(special.values()) | written)
        self.special = len(tested)
        self.in_pieces = [token for token in tested if len(self._encode(token)) != 1]
        self._blank: dict[int, bool] = {}
        samples, tokens = (max(1, sum(getattr(split, name) for split in splits)) for name in _SIZES)
        # Samples are drawn by content, so that the same ones are drawn each time.
        self._hashed_share = min(1.0, HASHES / samples)
        self._trip_share = min(1.0, TRIP_SAMPLES / samples, TRIP_TOKENS / tokens)
        self._splits = {
            "train": _Split(min(1.0, NEAR_TOKENS / max(1, manifest.train.tokens))),
            "heldout": _Split(min(1.0, NEAR_TOKENS // 4 / max(1, manifest.heldout.tokens))),
        }
        self._split = self._splits["train"]
        """The split whose samples are counted at this moment."""
        self.samples = self.tokens = self.trained = self.inconsistent = self.untrained = self.double_bos = (
            self.with_bos
        ) = 0
        self.answers = self.last_answers = self.unended = self.unended_inside = self.masked = self.unknown = (
            self.outside
        ) = 0
        self.packed = manifest.train.blocks is not None
        self._sides = Hashes(HASHES), Hashes(HASHES)
        """Hashes of rows that may contradict each other, by their side (RowKind.sides)."""

    @classmethod
    def read(cls, folder: Path, manifest: Manifest, tokenizer: Any, rows: int | None = None) -> Self:
        """Return the statistics of the shards in `folder`, each read once, one row group at a time."""
        read = cls(manifest, tokenizer, rows)
        for split, counts in (("train", manifest.train), ("heldout", manifest.heldout)):
            read._split = read._splits[split]
            for part in parts(folder, counts):
                read._count(part)
                read._draw(part)
        return read

    @property
    def examples(self) -> dict[str, str]:
        """Location and end of the first sample with each fault; those of training first."""
        return self._splits["heldout"].examples | self._splits["train"].examples

    @property
    def ends(self) -> Counter[str]:
        """Number of answers by the special token that ends them."""
        return self._splits["train"].ends + self._splits["heldout"].ends

    def _count(self, part: StoredSamples) -> None:
        import numpy

        trained, ids, starts = part.trained, part.ids, part.starts
        self.inconsistent += part.inconsistent
        if not len(starts):
            return
        self.samples += len(starts)
        self.tokens += len(ids)
        self.trained += int(trained.sum())
        per_sample = numpy.add.reduceat(trained, starts, dtype=numpy.int64)
        self.untrained += self._note("untrained", part, numpy.flatnonzero(per_sample == 0))
        if self.bos:
            begins = ids[starts] == self._tokenizer.bos_token_id
            self.with_bos += int(begins.sum())
            second = starts + (part.lengths > 1)
            twice = begins & (part.lengths > 1) & (ids[second] == self._tokenizer.bos_token_id)
            self.double_bos += self._note("double_bos", part, numpy.flatnonzero(twice))
        owners = numpy.repeat(numpy.arange(len(starts)), part.lengths)
        self.outside += self._note("outside", part, owners[(ids < 0) | (ids >= self._rows)])
        unknown = self._tokenizer.unk_token_id
        if unknown is not None and self._tokenizer.unk_token not in self.named:
            self.unknown += self._note("unknown", part, owners[ids == unknown])
        self._count_ends(part, owners)

    def _count_ends(self, part: StoredSamples, owners: Any) -> None:
        """Count the ends of answers, which are runs of trained tokens; white space after an end marker is
        ignored."""
        import numpy

        marks = numpy.asarray(sorted(self._marks))
        is_end = part.trained.copy()
        is_end[:-1] &= ~part.trained[1:] | (owners[1:] != owners[:-1])
        ends = numpy.flatnonzero(is_end)
        if not len(ends):
            return
        at = ends.copy()
        for _ in range(3):
            back = ~numpy.isin(part.ids[at], marks) & (at > 0)
            back[back] = self._are_blank(part.ids[at[back]]) & part.trained[at[back] - 1]
            at[back] -= 1
        ended = numpy.isin(part.ids[at], marks)
        for number, count in zip(*numpy.unique(part.ids[at[ended]], return_counts=True), strict=True):
            self._split.ends[self._marks[int(number)]] += int(count)
        owner = owners[ends]
        is_last = numpy.ones(len(ends), bool)
        is_last[:-1] = owner[1:] != owner[:-1]
        # A sample of max_length tokens may have been cut, so it need not have an end marker.
        cut = (
            is_last
            & (part.lengths[owner] >= self._max_length)
            & (ends == part.starts[owner] + part.lengths[owner] - 1)
        )
        following = numpy.minimum(ends + 1, len(part.ids) - 1)
        has_masked = (
            ~ended
            & (owners[following] == owner)
            & (following > ends)
            & numpy.isin(part.ids[following], marks)
        )
        self.answers += len(ends)
        self.last_answers += int((is_last & ~(cut & ~ended)).sum())
        self.unended += self._note("unended", part, owner[is_last & ~ended & ~cut])
        self.unended_inside += self._note("unended_inside", part, owner[~is_last & ~ended])
        self.masked += self._note("masked", part, owner[has_masked])

    def _are_blank(self, ids: Any) -> Any:
        import numpy

        values, places = numpy.unique(ids, return_inverse=True)
        for number in values.tolist():
            if number not in self._blank:
                self._blank[number] = not self._decode([number]).strip()
        return numpy.asarray([self._blank[number] for number in values.tolist()], bool)[places]

    def _note(self, name: str, part: StoredSamples, samples: Any) -> int:
        """Return the number of samples, and keep the first as an example."""
        if len(samples) and name not in self._split.examples:
            self._split.examples[name] = self._example(part, int(samples[0]))
        return len(samples)

    def _example(self, part: StoredSamples, sample: int) -> str:
        """Describe a sample by its location and its end."""
        ids = part.tokens(sample)[-_EXCERPT:].tolist()
        text = self._decode([number for number in ids if 0 <= number < len(self._tokenizer)])
        return f"{part.where(sample)}: {'...' if len(text) > _EXCERPT else ''}{text[-_EXCERPT:]!r}"

    def _draw(self, part: StoredSamples) -> None:
        """Keep samples for the later checks."""
        import numpy

        hashes, split = part.hashes, self._split
        # Rows equal each other if all of their sequences do.
        per_row = self._kind.sequences
        rows = hashes[::per_row].copy()
        for place in range(1, per_row):
            rows = rows * numpy.uint64(_SECOND) + hashes[place::per_row]
        split.hashes.add(rows, self._hashed_share)
        self._add_sides(part)
        for sample in new(hashes, self._trip_share, split.trip):
            # A sample that was cut may give other tokens.
            is_cut = part.lengths[sample] >= self._max_length
            kept = None if is_cut else (part.where(sample), part.tokens(sample).copy())
            split.trip[int(hashes[sample])] = kept
        # Equal samples are already counted. The sequences of a row share their prompt: the first one is
        # compared.
        for sample in new(hashes[::per_row], split.near_share, split.near):
            split.near[int(hashes[per_row * sample])] = part.compared_tokens(per_row * sample)

    def _add_sides(self, part: StoredSamples) -> None:
        if (hashed := self._kind.sides(part)) is None:
            return
        hashes, side = hashed
        for hashes_of_side, which in zip(self._sides, (side, ~side), strict=True):
            hashes_of_side.add(hashes[which], self._hashed_share)

    def contradictions(self) -> int:
        """Return the number of rows that contradict another one (RowKind.sides)."""
        (values, counts), (others, other_counts) = (side.counts() for side in self._sides)
        first, second = self._sides
        return int(counts[second.contains(values)].sum() + other_counts[first.contains(others)].sum())

    def round_trip(self) -> RoundTrip:
        """Tokenize the text of the drawn samples again; compare tokens if plain sentences keep theirs,
        otherwise texts."""
        train, heldout = (self._splits[name].trip for name in ("train", "heldout"))
        # In stored order; of a sample that is in both, training's.
        tried = [sample for sample in (train | heldout | train).values() if sample is not None]
        by_tokens = all(self._agree([self._encode(probe.format(eos=self.eos)) for probe in _PROBES], True))
        agree = self._agree([ids.tolist() for _, ids in tried], by_tokens)
        failed = [tried_sample for tried_sample, is_equal in zip(tried, agree, strict=True) if not is_equal]
        example = f"{failed[0][0]}: {self._decode(failed[0][1].tolist())[:_EXCERPT]!r}" if failed else ""
        return RoundTrip(len(tried), len(failed), by_tokens, example)

    def _agree(self, samples: list[list[int]], by_tokens: bool) -> list[bool]:
        known = [not ids or (min(ids) >= 0 and max(ids) < len(self._tokenizer)) for ids in samples]
        texts = [self._decode(ids) if is_known else "" for ids, is_known in zip(samples, known, strict=True)]
        again = self._encode_all(texts)
        if by_tokens:
            return [
                is_known and ids_again == ids
                for is_known, ids_again, ids in zip(known, again, samples, strict=True)
            ]
        return [
            is_known and self._decode(ids_again).split() == text.split()
            for is_known, ids_again, text in zip(known, again, texts, strict=True)
        ]

    def duplicates(self) -> Duplicates:
        """Count equal and nearly equal samples among the drawn ones."""
        import numpy

        examples = dict[str, str]()
        both = self._splits["train"], self._splits["heldout"]
        train, heldout = (len(split.near) for split in both)
        samples = [tokens for split in both for tokens in split.near.values()]
        drawn = {"duplicates", "overlap"} if self._hashed_share < 1 else set()
        drawn |= {"near duplicates", "near overlap"} if both[0].near_share < 1 else set()
        signed, which = signatures(samples)
        kind = (which >= train).astype(numpy.int64)
        before = earlier(signed)
        is_near, is_near_train = (
            (before >= 0) & (kind == 0),
            (before >= 0) & (kind == 1) & (kind[before] == 0),
        )
        for name, matches in (("near duplicates", is_near), ("near overlap", is_near_train)):
            for index in numpy.flatnonzero(matches)[:1]:
                texts = [
                    self._decode(samples[which[place]].tolist())[-_EXCERPT:]
                    for place in (index, before[index])
                ]
                examples[name] = f"{texts[0]!r} and {texts[1]!r}"
        (values, counts), (others, other_counts) = (split.hashes.counts() for split in both)
        overlap = int(other_counts[both[0].hashes.contains(others)].sum())
        return Duplicates(
            int(counts.sum()),
            int(other_counts.sum()),
            int(counts.sum()) - len(values),
            overlap,
            train,
            heldout,
            int(is_near.sum()),
            int(is_near_train.sum()),
            drawn,
            examples,
        )

    def _encode(self, text: str) -> list[int]:
        return self._encode_all([text])[0]

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        encoded: list[list[int]] = self._tokenizer(texts, **options)["input_ids"] if texts else []
        return encoded

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
