"""The best of several points: paired by sample, with the choice of the best counted in."""

import numpy
import pytest

from flytune.objectives.dpo import PREFERENCE_LOSS
from flytune.records.figures import ACCURACY, LOSS
from flytune.sweeps.comparison import Scored, compare
from tests.support.sweeps import score, scored

HARD = numpy.linspace(0.5, 6.0, 40)
"""Loss of 40 samples, some much harder than others, as of every model."""
NOISE = numpy.random.default_rng(3).normal(0.0, 1.0, (4, 40))


def unpaired(one, other):
    """Return whether the intervals of two points overlap."""
    first, second = (point.figures[0].tuned for point in (one, other))
    return first.low <= second.high and second.low <= first.high


def test_pairs_separate_points_whose_own_intervals_overlap():
    points = [
        scored(HARD + shift + 0.01 * noise) for shift, noise in zip((0.0, 0.05, 0.1, 0.4), NOISE, strict=True)
    ]
    assert all(unpaired(points[0], other) for other in points[1:])
    found = compare(points)
    assert (found.best, found.as_good, found.elsewhere, found.unpaired) == (0, (), (), ())
    assert [found.differences[at].value for at in (1, 2, 3)] == pytest.approx([0.05, 0.1, 0.4], abs=0.01)
    assert all(0 < found.differences[at].low < found.differences[at].high for at in (1, 2, 3))


def test_pairs_do_not_separate_points_whose_samples_differ_both_ways():
    points = [scored(3.0 + noise) for noise in NOISE]
    found = compare(points)
    best = min(range(4), key=lambda at: points[at].figures[0].tuned.value)
    assert found.best == best
    assert found.as_good == tuple(at for at in range(4) if at != best)
    assert all(found.differences[at].low < 0 < found.differences[at].high for at in found.as_good)


@pytest.mark.slow
def test_equal_models_are_seldom_told_apart_although_the_best_of_them_was_chosen():
    """Of ten equal models, intervals of one pair alone would call some point worse in most sweeps."""
    draw, alone, together = numpy.random.default_rng(0), 0, 0
    for _ in range(60):
        losses = HARD + draw.normal(0.0, 0.5, (10, 40))
        points = [scored(loss) for loss in losses]
        found = compare(points)
        together += len(found.as_good) < 9
        apart = losses - losses[found.best]
        errors = apart.std(axis=1, ddof=1) / 40**0.5
        alone += any(apart[at].mean() > 1.96 * errors[at] for at in range(10) if at != found.best)
    assert alone > 20, "with one pair's intervals"
    assert together <= 9


def test_a_share_of_which_more_is_better():
    right = numpy.arange(60) < 40
    better, worse = right | (numpy.arange(60) >= 45), right & (numpy.arange(60) > 1)
    found = compare(
        [scored(worse, figure=ACCURACY), scored(better, figure=ACCURACY), scored(right, figure=ACCURACY)]
    )
    assert found.best == 1
    assert found.as_good == ()
    assert found.differences[0].high < 0


def test_other_samples_are_not_compared():
    found = compare([scored(HARD), scored(HARD + 1, samples="b"), scored(HARD + 0.5)])
    assert (found.best, found.elsewhere, found.as_good) == (0, (1,), ())
    assert set(found.differences) == {2}


def test_points_without_scores_of_samples_are_compared_by_their_intervals():
    found = compare([score(2.0), score(1.95), score(3.0)])
    assert (found.best, found.as_good, found.unpaired) == (1, (0,), (0, 2))
    assert not found.differences


def test_weights_are_those_of_the_mean():
    weights = numpy.arange(1, 41)
    found = compare([scored(HARD, weights=weights), scored(HARD + 0.1 * (weights > 20), weights=weights)])
    assert found.differences[1].value == pytest.approx(0.1 * weights[20:].sum() / weights.sum())


@pytest.mark.parametrize(("losses", "as_good"), [([1.0], (1,)), ([1.0, 1.0], (1,))])
def test_one_sample_and_equal_points_separate_nothing(losses, as_good):
    other = [loss + (len(losses) == 1) for loss in losses]
    found = compare([scored(losses), scored(other)])
    assert (found.best, found.as_good) == (0, as_good)


def both(loss, accuracy, beta):
    """Scores of a point of dpo, by two figures."""
    one, other = scored(loss, figure=PREFERENCE_LOSS), scored(accuracy, figure=ACCURACY)
    scores = one.scores.model_copy(update={"scores": one.scores.scores | other.scores.scores})
    return Scored(figures=[*one.figures, *other.figures], scores=scores, scale={"objective.beta": beta})


def test_a_figure_whose_scale_is_varied_is_not_compared():
    worse, better = both(HARD, HARD < 3, 0.1), both(HARD + 1, HARD < 4, 0.5)
    assert compare([worse, better.model_copy(update={"scale": worse.scale})]).best == 0
    found = compare([worse, better])
    assert (found.figure.name, found.best) == ("reward_accuracy", 1)


def test_objectives_without_a_figure_in_common_have_no_best():
    found = compare([scored(HARD), scored(HARD, figure=ACCURACY)])
    assert (found.figure, found.best, found.as_good) == (None, None, ())
    assert compare([]).best is None


def test_a_loss_of_tokens_is_not_that_of_pairs():
    other = LOSS.model_copy(update={"unit": "nats per pair"})
    assert compare([scored(HARD), scored(HARD, figure=other)]).best is None
