"""Comparison of a sweep's points with the best one: paired by held-out sample, and with the choice of the
best counted in."""

import math
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import Field

from flytune.models.scoring import resampled
from flytune.records import Interval, MeasuredFigure, SampleScores
from flytune.schema import Strict, omitted


class Scored(Strict):
    """Figures of a point that succeeded, as far as points are compared."""

    figures: list[MeasuredFigure] = Field(default=[])
    """Figures of the objective on the held-out samples; none if the point failed."""
    scores: SampleScores | None = None
    """Scores of each of these samples."""
    doubts: list[str] = omitted([])
    """Clauses that make the figures doubtful (Metrics.doubts)."""
    scale: dict[str, Any] = Field(default={})
    """Values of the recipe's fields that change the scale of a figure, by dotted field."""

    def figure(self, name: str) -> MeasuredFigure | None:
        """Return the figure with a name; None if it was not measured, or is not finite."""
        named = next((figure for figure in self.figures if figure.name == name), None)
        return named if named and math.isfinite(named.tuned.value) else None


class PointComparison(NamedTuple):
    """The best of several points, and the others compared with it; points are named by their places."""

    figure: MeasuredFigure | None
    """Figure that they were compared by, as the best point has it; None if they share none."""
    best: int | None = None
    differences: Mapping[int, Interval] = MappingProxyType({})
    """Figure of each other point less that of the best one, paired by sample; the intervals hold together for
    all pairs."""
    as_good: tuple[int, ...] = ()
    """Points that are not significantly worse than the best one."""
    elsewhere: tuple[int, ...] = ()
    """Points that were scored on other samples or tokens than the best one."""
    unpaired: tuple[int, ...] = ()
    """Points, or the best one, without scores of each sample: the intervals of both figures were compared."""


def compare(points: Sequence[Scored]) -> PointComparison:
    """Return the comparison of points by the first figure of their objective that all of them have on the
    same scale."""
    name = _common_figure(points)
    figures = {place: point.figure(name) for place, point in enumerate(points)} if name else {}
    measured = {place: figure for place, figure in figures.items() if figure}
    if not measured:
        return PointComparison(None)
    sign = -1 if next(iter(measured.values())).better == "higher" else 1
    best = min(measured, key=lambda place: sign * measured[place].tuned.value)
    figure, scores_of_best = measured[best], points[best].scores
    elsewhere, unpaired, paired = [], [], []
    for place in measured:
        scores = points[place].scores
        if place == best:
            continue
        if scores_of_best and scores and scores.samples_sha256 != scores_of_best.samples_sha256:
            elsewhere.append(place)
        elif _has(scores_of_best, figure.name) and _has(scores, figure.name):
            paired.append(place)
        else:
            unpaired.append(place)
    intervals = _differences([points[place] for place in (best, *paired)], figure.name) if paired else []
    differences = dict(zip(paired, intervals, strict=True))
    as_good = [place for place in unpaired if _overlap(measured[place].tuned, figure.tuned)]
    for place, difference in differences.items():
        if min(sign * difference.low, sign * difference.high) <= 0:
            as_good.append(place)
    return PointComparison(
        figure, best, differences, tuple(sorted(as_good)), tuple(elsewhere), tuple(unpaired)
    )


def _common_figure(points: Sequence[Scored]) -> str | None:
    """Return the name of the first figure that all points have on the same scale; those compared by sample
    come first."""
    shared = [
        figure
        for figure in (points[0].figures if points else [])
        if figure.better != "neither"
        and all(point.figures and _same_scale(figure, point, points[0]) for point in points)
    ]
    ranked = sorted(shared, key=lambda figure: not figure.is_paired)
    return ranked[0].name if ranked else None


def _same_scale(figure: MeasuredFigure, point: Scored, other: Scored) -> bool:
    has = any(candidate.name == figure.name and candidate.unit == figure.unit for candidate in point.figures)
    return has and all(point.scale.get(field) == other.scale.get(field) for field in figure.scaled_by)


def _has(scores: SampleScores | None, name: str) -> bool:
    return scores is not None and name in scores.scores


def _overlap(interval: Interval, other: Interval) -> bool:
    return interval.low <= other.high and other.low <= interval.high


def _differences(points: Sequence[Scored], name: str) -> list[Interval]:
    """Return the differences of all points but the first from the first one.

    Their intervals hold together for all pairs of points, with a probability of 95 %, so that they hold
    although the same samples chose the first point as the best of all: the bootstrap of the largest
    standardized difference of any pair. Hsu, Multiple Comparisons (1996), chapter 5.
    """
    import numpy

    known = [point.scores for point in points if point.scores]
    sums = numpy.stack([scores.scores[name] for scores in known], axis=1)
    weights = numpy.asarray(known[0].weights)
    counted = weights > 0
    sums, weights = sums[counted], weights[counted]
    means = sums.sum(axis=0) / weights.sum()
    apart = means[1:] - means[0]
    if len(weights) < 2:
        return [
            Interval(value=value, low=-sys.float_info.max, high=sys.float_info.max)
            for value in apart.tolist()
        ]
    drawn = resampled(sums, weights) - means
    largest = numpy.zeros(len(drawn))
    for at in range(len(points) - 1):
        errors = drawn[:, at + 1 :] - drawn[:, at : at + 1]
        deviations = errors.std(axis=0)
        varied = deviations > 0
        if varied.any():
            largest = numpy.maximum(largest, (numpy.abs(errors[:, varied]) / deviations[varied]).max(axis=1))
    reach = _quantile_of_t(float(numpy.percentile(largest, 95)), len(weights)) * (
        drawn[:, 1:] - drawn[:, :1]
    ).std(axis=0)
    ends = zip(apart.tolist(), (apart - reach).tolist(), (apart + reach).tolist(), strict=True)
    return [Interval(value=value, low=low, high=high) for value, low, high in ends]


def _quantile_of_t(normal: float, samples: int) -> float:
    """Return the quantile of Student's t for that of the normal distribution, as the spread itself is of so
    many samples.

    Abramowitz & Stegun (1964), 26.7.5; times the factor by which the bootstrap's spread is too small.
    """
    free = samples - 1
    more = (normal**3 + normal) / (4 * free) + (5 * normal**5 + 16 * normal**3 + 3 * normal) / (96 * free**2)
    return float((normal + more) * (samples / free) ** 0.5)
