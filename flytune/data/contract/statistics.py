"""Statistics of prepared data for the contract, counted in one pass over all samples."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flytune.data.contract.duplicates import Hashes, below, earlier, firsts, signatures
from flytune.data.formats import CHATS
from flytune.data.render import ChatTemplate
from flytune.data.stored_samples import Part, parts
from flytune.records import Manifest

HASHES = 5_000_000
"""Samples whose hashes are kept, 8 bytes each; of more, a share is drawn by content, so that equal ones are drawn together."""
NEAR_TOKENS = 2_000_000
"""Tokens of training samples that are searched for near duplicates; a quarter of it for held-out samples."""
TRIP_SAMPLES, TRIP_TOKENS = 256, 200_000
"""Approximate numbers of samples and tokens that are decoded and tokenized again."""
_EXCERPT = 60
_SECOND = 0x9E3779B97F4A7C15
"""Odd factor that joins the hashes of a pair's sequences, in their order; by the golden ratio (Knuth, TAOCP 3, §6.4)."""
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


class Statistics:
    """Counts of a prepared data set, of both splits together unless noted."""

    def __init__(self, folder: Path, manifest: Manifest, tokenizer: Any, rows: int | None = None) -> None:
        """Count; `rows` are those of the model's embedding, where they are known."""
        self._tokenizer, self._max_length = tokenizer, manifest.max_length
        self._rows = min(len(tokenizer), rows or len(tokenizer))
        self.bos, self.eos, self.pad = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token
        special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        special[tokenizer.eos_token_id] = self.eos
        self.named = {token for token in (self.bos, self.eos, self.pad) if token}
        # The pad token is only used by its number.
        self.written = {token for token in (self.bos, self.eos) if token}
        # Answers to compare are of messages or of text; the marks of a template are a superset of those of text.
        compared = manifest.pairs or manifest.labels
        is_chat = bool(set(manifest.format.split(", ")) & set(CHATS)) or (compared and bool(tokenizer.chat_template))
        marks = ChatTemplate(tokenizer).marks if is_chat else {*special.values(), self.eos} - ({self.bos} - {self.eos})
        self._marks = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if str(token) in marks}
        self._marks[tokenizer.eos_token_id] = self.eos
        written = set(_MARKER.findall(tokenizer.get_chat_template())) if is_chat else set()
        # A token may begin with a mark: <|im_start|>user.
        written -= {mark for mark in written for token in special.values() if token != mark and token.startswith(mark)}
        tested = sorted(self.named | set(special.values()) | written)
        self.special = len(tested)
        self.in_pieces = [token for token in tested if len(self._encode(token)) != 1]
        self._blank: dict[int, bool] = {}
        self.examples: dict[str, str] = {}
        self.ends: Counter[str] = Counter()
        """Number of answers by the special token that ends them."""
        self.samples = self.tokens = self.trained = self.inconsistent = self.untrained = self.double_bos = self.with_bos = 0
        self.answers = self.last_answers = self.unended = self.unended_inside = self.masked = self.unknown = self.outside = 0
        self.packed, self._pairs = manifest.train.blocks is not None, manifest.pairs
        self._trip: list[tuple[str, Any]] = []
        self._trained, self._heldout, self._overlap = Hashes(HASHES), 0, 0
        self._near: dict[str, list[Any]] = {"train": [], "heldout": []}
        self._seen: dict[str, set[int]] = {"trip": set(), "train": set(), "heldout": set()}
        """Hashes of the kept samples, so that only one of many equal samples is kept."""
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

    def _count_ends(self, part: Part, owners: Any) -> None:
        """Count the ends of answers, which are runs of trained tokens; white space after an end marker is ignored."""
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
        # A sample of max_length tokens may have been cut, so it need not have an end marker.
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
        """Return the number of samples, and keep the first as an example."""
        if len(samples) and name not in self.examples:
            self.examples[name] = self._example(part, int(samples[0]))
        return len(samples)

    def _example(self, part: Part, sample: int) -> str:
        """Describe a sample by its location and its end."""
        ids = part.tokens(sample)[-_EXCERPT:].tolist()
        text = self._decode([number for number in ids if 0 <= number < len(self._tokenizer)])
        return f"{part.where(sample)}: {'...' if len(text) > _EXCERPT else ''}{text[-_EXCERPT:]!r}"

    def _draw(self, part: Part, split: str, near_share: float) -> None:
        """Keep samples for the later checks, drawn by content so that the same samples are drawn each time."""
        import numpy

        hashes = part.hashes
        # Pairs equal each other if both of their sequences do.
        rows = hashes[::2] * numpy.uint64(_SECOND) + hashes[1::2] if self._pairs else hashes
        compared = rows[below(rows, self._hashed_share)]
        if split == "train":
            self._trained.add(compared)
        else:
            self._heldout += len(compared)
            self._overlap += int(self._trained.contains(compared).sum())
        for sample in firsts(hashes, self._trip_share, self._seen["trip"]):
            # A sample that was cut may give other tokens.
            if part.lengths[sample] < self._max_length:
                self._trip.append((part.where(sample), part.tokens(sample).copy()))
        # Equal samples are already counted. The two sequences of a pair share their prompt: the chosen one is compared.
        step = 2 if self._pairs else 1
        found = firsts(hashes[::step], near_share, self._seen[split])
        self._near[split] += [part.tokens(step * sample).copy() for sample in found]

    def round_trip(self) -> RoundTrip:
        """Tokenize the text of the drawn samples again; compare tokens if plain sentences keep theirs, otherwise texts."""
        by_tokens = all(self._agrees(self._encode(probe.format(eos=self.eos)), True) for probe in _PROBES)
        failed = [(where, ids) for where, ids in self._trip if not self._agrees(ids.tolist(), by_tokens)]
        example = f"{failed[0][0]}: {self._decode(failed[0][1].tolist())[:_EXCERPT]!r}" if failed else ""
        return RoundTrip(len(self._trip), len(failed), by_tokens, example)

    def _agrees(self, ids: list[int], by_tokens: bool) -> bool:
        if ids and (min(ids) < 0 or max(ids) >= len(self._tokenizer)):
            return False
        text = self._decode(ids)
        again = self._encode(text)
        return again == ids if by_tokens else self._decode(again).split() == text.split()

    def duplicates(self) -> Duplicates:
        """Count equal and nearly equal samples among the drawn ones."""
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
                examples[name] = f"{texts[0]!r} and {texts[1]!r}"
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
