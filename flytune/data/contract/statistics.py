"""The census of prepared data: every sample is looked at once, and what the contract asks about is counted."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flytune.data.contract.duplicates import Hashes, below, earlier, firsts, signatures
from flytune.data.formats import CHATS
from flytune.data.render import ChatTemplate
from flytune.data.stored_samples import Part, parts
from flytune.records.dataset import Manifest

HASHES = 5_000_000
"""Samples whose hashes are held, 8 bytes each; of more a share is drawn by content, so that equal ones are drawn together."""
NEAR_TOKENS = 2_000_000
"""Of training samples that are looked through for near duplicates; of held-out samples a quarter."""
TRIP_SAMPLES, TRIP_TOKENS = 256, 200_000
"""About so many samples, and tokens, are decoded and tokenized again."""
_EXCERPT = 60
_MARKER = re.compile(r"<\|[A-Za-z_]+\|>")
_PROBES = ("The quick brown fox\n\tjumps  over 12 lazy dogs, doesn't it?", "{eos}\nHello {eos} there")


@dataclass(frozen=True)
class Trip:
    """Samples decoded and tokenized again."""

    tried: int
    failed: int
    by_tokens: bool
    """Compared token by token; otherwise the texts are."""
    example: str


@dataclass(frozen=True)
class Duplicates:
    """Samples that equal, or nearly equal, one that stands before them, among those drawn."""

    train: int
    heldout: int
    equal: int
    overlap: int
    near_train: int
    near_heldout: int
    near: int
    near_overlap: int
    drawn: set[str]
    """The questions that were asked of a share of the samples only."""
    examples: dict[str, str] = field(default_factory=dict)


class Census:
    """Counts of a prepared data set, both splits together where nothing else is said."""

    def __init__(self, folder: Path, manifest: Manifest, tokenizer: Any) -> None:
        self._tokenizer, self._max_length = tokenizer, manifest.max_length
        self.bos, self.eos, self.pad = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token
        special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        special[tokenizer.eos_token_id] = self.eos
        self.named = {token for token in (self.bos, self.eos, self.pad) if token}
        # The pad token is used by its number alone.
        self.written = {token for token in (self.bos, self.eos) if token}
        is_chat = bool(set(manifest.format.split(", ")) & set(CHATS))
        marks = ChatTemplate(tokenizer).marks if is_chat else {*special.values(), self.eos} - ({self.bos} - {self.eos})
        self._marks = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if str(token) in marks}
        self._marks[tokenizer.eos_token_id] = self.eos
        written = set(_MARKER.findall(tokenizer.get_chat_template())) if is_chat else set()
        asked = sorted(self.named | set(special.values()) | written)
        self.special = len(asked)
        self.in_pieces = [token for token in asked if len(self._encode(token)) != 1]
        self._blank: dict[int, bool] = {}
        self.examples: dict[str, str] = {}
        self.ends: Counter[str] = Counter()
        """How often which special token ends a trained stretch."""
        self.samples = self.tokens = self.trained = self.torn = self.untrained = self.double_bos = self.with_bos = 0
        self.answers = self.last_answers = self.unended = self.unended_inside = self.masked = self.unknown = self.outside = 0
        self.packed = manifest.train.blocks is not None
        self._trip: list[tuple[str, Any]] = []
        self._trained, self._heldout, self._overlap = Hashes(HASHES), 0, 0
        self._near: dict[str, list[Any]] = {"train": [], "heldout": []}
        self._seen: dict[str, set[int]] = {"trip": set(), "train": set(), "heldout": set()}
        """Hashes of the samples that are kept: the copies of one that stands there a million times are not."""
        total = manifest.train.samples + manifest.heldout.samples
        tokens = manifest.train.tokens + manifest.heldout.tokens
        self._hashed_share = min(1.0, HASHES / max(1, total))
        self._trip_share = min(1.0, TRIP_SAMPLES / max(1, total), TRIP_TOKENS / max(1, tokens))
        self._drawn = {"duplicates", "overlap"} if self._hashed_share < 1 else set()
        self._drawn |= {"near duplicates", "near overlap"} if manifest.train.tokens > NEAR_TOKENS else set()
        for split, counts, most in (("train", manifest.train, NEAR_TOKENS), ("heldout", manifest.heldout, NEAR_TOKENS // 4)):
            for part in parts(folder, counts):
                self._count(part)
                self._draw(part, split, min(1.0, most / max(1, counts.tokens)))

    def _count(self, part: Part) -> None:
        import numpy

        trained, ids, starts = part.trained, part.ids, part.starts
        self.torn += part.torn
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
        self.outside += self._note("outside", part, owners[(ids < 0) | (ids >= len(self._tokenizer))])
        unknown = self._tokenizer.unk_token_id
        if unknown is not None and self._tokenizer.unk_token not in self.named:
            self.unknown += self._note("unknown", part, owners[ids == unknown])
        self._count_ends(part, owners)

    def _count_ends(self, part: Part, owners: Any) -> None:
        """An answer is a stretch of trained tokens. White space behind its end marker is left out of account."""
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
            self.ends[self._marks[int(number)]] += int(count)
        owner = owners[ends]
        is_last = numpy.ones(len(ends), bool)
        is_last[:-1] = owner[1:] != owner[:-1]
        # A sample of max_length tokens may have been cut: it need not end.
        cut = is_last & (part.lengths[owner] >= self._max_length) & (ends == part.starts[owner] + part.lengths[owner] - 1)
        following = numpy.minimum(ends + 1, len(part.ids) - 1)
        has_masked = ~ended & (owners[following] == owner) & (following > ends) & numpy.isin(part.ids[following], marks)
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

    def _note(self, name: str, part: Part, samples: Any) -> int:
        """How many there are; keeps the first as the example."""
        if len(samples) and name not in self.examples:
            self.examples[name] = self._example(part, int(samples[0]))
        return len(samples)

    def _example(self, part: Part, sample: int) -> str:
        """Where a sample stands, and how it ends."""
        ids = part.tokens(sample)[-_EXCERPT:].tolist()
        text = self._decode([number for number in ids if 0 <= number < len(self._tokenizer)])
        return f"{part.where(sample)}: {'...' if len(text) > _EXCERPT else ''}{text[-_EXCERPT:]!r}"

    def _draw(self, part: Part, split: str, near_share: float) -> None:
        """Keeps what the later questions are asked of; by content, so that the same samples are drawn each time."""
        hashes = part.hashes
        asked = hashes[below(hashes, self._hashed_share)]
        if split == "train":
            self._trained.add(asked)
        else:
            self._heldout += len(asked)
            self._overlap += int(self._trained.holds(asked).sum())
        for sample in firsts(hashes, self._trip_share, self._seen["trip"]):
            # What was cut need not be what its text gives.
            if part.lengths[sample] < self._max_length:
                self._trip.append((part.where(sample), part.tokens(sample).copy()))
        # Equal ones are counted already.
        self._near[split] += [part.tokens(sample).copy() for sample in firsts(hashes, near_share, self._seen[split])]

    def round_trip(self) -> Trip:
        """Tokenizes the text of the drawn samples again; compared by tokens where plain sentences come back so."""
        by_tokens = all(self._agrees(self._encode(probe.format(eos=self.eos)), True) for probe in _PROBES)
        failed = [(where, ids) for where, ids in self._trip if not self._agrees(ids.tolist(), by_tokens)]
        example = f"{failed[0][0]}: {self._decode(failed[0][1].tolist())[:_EXCERPT]!r}" if failed else ""
        return Trip(len(self._trip), len(failed), by_tokens, example)

    def _agrees(self, ids: list[int], by_tokens: bool) -> bool:
        if ids and (min(ids) < 0 or max(ids) >= len(self._tokenizer)):
            return False
        text = self._decode(ids)
        again = self._encode(text)
        return again == ids if by_tokens else self._decode(again).split() == text.split()

    def duplicates(self) -> Duplicates:
        """Counts equal and nearly equal samples, among those drawn."""
        import numpy

        examples = dict[str, str]()
        train, heldout = len(self._near["train"]), len(self._near["heldout"])
        samples = self._near["train"] + self._near["heldout"]
        signed, which = signatures(samples)
        kind = (which >= train).astype(numpy.int64)
        before = earlier(signed)
        is_near, is_near_train = (before >= 0) & (kind == 0), (before >= 0) & (kind == 1) & (kind[before] == 0)
        for name, found in (("near duplicates", is_near), ("near overlap", is_near_train)):
            for index in numpy.flatnonzero(found)[:1]:
                texts = [self._decode(samples[which[place]].tolist())[-_EXCERPT:] for place in (index, before[index])]
                examples[name] = f"{texts[0]!r} beside {texts[1]!r}"
        return Duplicates(
            self._trained.added, self._heldout,
            self._trained.added - len(self._trained.different), self._overlap,
            train, heldout, int(is_near.sum()), int(is_near_train.sum()), self._drawn, examples,
        )  # fmt: skip

    def _encode(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return found

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
