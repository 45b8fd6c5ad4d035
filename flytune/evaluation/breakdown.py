"""Breakdown of an evaluation: held-out loss by source and by length, and which model wins how often."""

import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from flytune.models import Row, bootstrap
from flytune.records import Answer, Part, Wins
from flytune.sentences import counted

LENGTHS = 4
"""Number of ranges of length, with about equally many samples in each."""
_FEWEST = 2
"""Smallest number of samples whose win rate is reported: a single one has no interval."""


def parts(rows: Sequence[Row], sources: Sequence[str], base: Any, tuned: Any, tokens: Any) -> list[Part]:
    """Return base and tuned loss of each source, if there are several, and of each range of lengths.

    Args:
        rows: the scored held-out samples.
        sources: name of each sample's source.
        base, tuned: negative log-likelihood of each sample, in nats, shape (samples,).
        tokens: scored tokens of each sample, shape (samples,).
    """
    named = [*_by_source(sources), *_by_length([len(row["input_ids"]) for row in rows])]
    return _losses(named, base, tuned, tokens)


def of_labels(base: Any, tuned: Any, tokens: Any, desirable: int) -> list[Part]:
    """Return base and tuned loss of desirable and of undesirable answers; none where there is one kind alone.

    Args:
        desirable: number of desirable answers, which come first.
    """
    if not 0 < desirable < len(tokens):
        return []
    places = list(range(len(tokens)))
    named = [("label", "desirable", places[:desirable]), ("label", "undesirable", places[desirable:])]
    return _losses(named, base, tuned, tokens)


def _losses(named: Sequence[tuple[str, str, list[int]]], base: Any, tuned: Any, tokens: Any) -> list[Part]:
    """Return the losses of each kind, name and list of samples that has tokens to score; one sample has no
    interval."""
    import numpy

    losses = []
    for kind, name, chosen in named:
        if not tokens[chosen].sum():
            continue
        nll = numpy.stack([base[chosen], tuned[chosen], (tuned - base)[chosen]], axis=1)
        points, lows, highs = bootstrap(nll, tokens[chosen])
        losses.append(
            Part(
                kind=kind,
                name=name,
                samples=int((tokens[chosen] > 0).sum()),
                tokens=int(tokens[chosen].sum()),
                base_loss=points[0],
                tuned_loss=points[1],
                difference=points[2],
                difference_low=lows[2],
                difference_high=highs[2],
            )
        )
    return losses


def _by_source(sources: Sequence[str]) -> Iterator[tuple[str, str, list[int]]]:
    names = list(dict.fromkeys(sources))
    for name in names if len(names) > 1 else ():
        yield "source", name, [at for at, source in enumerate(sources) if source == name]


def _by_length(lengths: Sequence[int]) -> Iterator[tuple[str, str, list[int]]]:
    ranked = sorted(lengths)
    # The largest length of each range; equal lengths stay together.
    ends = sorted(
        {
            ranked[len(ranked) * part // LENGTHS - 1]
            for part in range(1, LENGTHS + 1)
            if len(ranked) * part >= LENGTHS
        }
    )
    low = ranked[0] if ranked else 0
    for end in ends if len(ends) > 1 else ():
        first = f"{low} to " if low < end else ""
        yield (
            "length",
            f"{first}{counted(end, 'token')}",
            [at for at, length in enumerate(lengths) if low <= length <= end],
        )
        low = end + 1


def wins(differences: Any) -> Wins:
    """Count the negative (tuned is better), positive and zero values of tuned minus base, one per sample or
    answer."""
    import numpy

    better, worse = int((differences < 0).sum()), int((differences > 0).sum())
    if len(differences) < _FEWEST:
        return Wins(tuned=better, base=worse, ties=len(differences) - better - worse)
    rate, low, high = bootstrap(
        0.5 - 0.5 * numpy.sign(differences)[:, None], numpy.ones(len(differences), dtype=int)
    )
    rates = {"rate": rate[0], "rate_low": low[0], "rate_high": high[0]}
    return Wins(tuned=better, base=worse, ties=len(differences) - better - worse, **rates)


def answer_wins(answers: Sequence[Answer]) -> Wins:
    """Count the answers of each model that share more words with the reference, by F1."""
    import numpy

    return wins(numpy.array([answer.base_f1 - answer.tuned_f1 for answer in answers]))


def f1(answer: str, reference: str) -> float:
    """Return the F1 score of an answer's words: harmonic mean of precision and recall against the reference,
    0 to 1.

    Case and punctuation at the ends of words are ignored. Rajpurkar et al., SQuAD (2016), section 6.1,
    articles not dropped.
    """
    answered, expected = _words(answer), _words(reference)
    shared = (answered & expected).total()
    return 2 * shared / (answered.total() + expected.total()) if answered or expected else 1.0


def _words(text: str) -> Counter[str]:
    stripped = (word.strip(string.punctuation) for word in text.lower().split())
    return Counter(word for word in stripped if word)
