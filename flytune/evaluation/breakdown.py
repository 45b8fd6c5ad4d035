"""Where a tuned model is better, and where it is not: held-out loss by source and by length, and answers held side by side."""

import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from flytune.models.scoring import Row, bootstrap
from flytune.records.metrics import Answer, Part, Wins

LENGTHS = 4
"""Parts that samples are cut into by their length, of about equally many."""
_FEWEST = 2
"""Samples of which a part is told: of a single one nothing follows."""


def parts(rows: Sequence[Row], sources: Sequence[str], base: Any, tuned: Any, tokens: Any) -> list[Part]:
    """Base and tuned loss of each source, where there are several, and of short and long samples.

    Args:
        rows: the held-out samples that were scored.
        sources: the name of each one's source.
        base, tuned: negative log-likelihood of each, in nats, shape (samples,).
        tokens: scored tokens of each, shape (samples,).
    """
    import numpy

    found = []
    for kind, name, chosen in [*_by_source(sources), *_by_length([len(row["input_ids"]) for row in rows])]:
        nll = numpy.stack([base[chosen], tuned[chosen], (tuned - base)[chosen]], axis=1)
        if len(chosen) < _FEWEST or not tokens[chosen].sum():
            continue
        points, lows, highs = bootstrap(nll, tokens[chosen])
        found.append(
            Part(
                kind=kind,
                name=name,
                samples=len(chosen),
                tokens=int(tokens[chosen].sum()),
                base_loss=points[0],
                tuned_loss=points[1],
                difference=points[2],
                difference_low=lows[2],
                difference_high=highs[2],
            )
        )
    return found


def _by_source(sources: Sequence[str]) -> Iterator[tuple[str, str, list[int]]]:
    names = list(dict.fromkeys(sources))
    for name in names if len(names) > 1 else ():
        yield "source", name, [at for at, source in enumerate(sources) if source == name]


def _by_length(lengths: Sequence[int]) -> Iterator[tuple[str, str, list[int]]]:
    ranked = sorted(lengths)
    # The longest of each part; equal lengths stay together.
    ends = sorted(
        {ranked[len(ranked) * part // LENGTHS - 1] for part in range(1, LENGTHS + 1) if len(ranked) * part >= LENGTHS}
    )
    low = ranked[0] if ranked else 0
    for end in ends if len(ends) > 1 else ():
        yield "length", f"{low} to {end} tokens", [at for at, length in enumerate(lengths) if low <= length <= end]
        low = end + 1


def wins(differences: Any) -> Wins:
    """Of tuned less base, one a sample or answer: how often the tuned model is lower (better), higher, or as good."""
    better, worse = int((differences < 0).sum()), int((differences > 0).sum())
    return Wins(tuned=better, base=worse, ties=len(differences) - better - worse)


def answer_wins(answers: Sequence[Answer]) -> Wins:
    """Whose answer shares more words with the reference, by F1."""
    import numpy

    return wins(numpy.array([answer.base_f1 - answer.tuned_f1 for answer in answers]))


def f1(answer: str, reference: str) -> float:
    """Of the words that an answer shares with its reference, the harmonic mean of precision and recall; 0 to 1.

    Case and punctuation at the ends of words do not count. Rajpurkar et al., SQuAD (2016), section 6.1, articles not dropped.
    """
    said, meant = _words(answer), _words(reference)
    shared = (said & meant).total()
    return 2 * shared / (said.total() + meant.total()) if said or meant else 1.0


def _words(text: str) -> Counter[str]:
    stripped = (word.strip(string.punctuation) for word in text.lower().split())
    return Counter(word for word in stripped if word)
