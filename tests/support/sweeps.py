"""Sample points of sweeps, and their scores."""

import math

import numpy
import pytest

from flytune.models import scoring
from flytune.records import SampleScores
from flytune.records.figures import LOSS, PERPLEXITY
from flytune.sweeps import grid as sweeps_grid
from flytune.sweeps.comparison import Scored
from tests.support.plans import recipe_of


def drawn(grid=None, changes=(), recipe=None, most=24):
    return sweeps_grid.draw(recipe or recipe_of(), grid or {}, list(changes), most)


def score(loss, reach=0.1):
    """Return the figures of a point of which only the mean and its interval are known."""
    values = {"tuned": {"value": loss, "low": loss - reach, "high": loss + reach}}
    perplexity = {"tuned": {end: math.exp(value) for end, value in values["tuned"].items()}}
    return Scored(figures=[PERPLEXITY.measured(perplexity), LOSS.measured(values)])


def scored(losses, samples="a", figure=LOSS, weights=None, **scale):
    """Return the scores of a point, from its loss on each sample."""
    weights = numpy.ones(len(losses)) if weights is None else numpy.asarray(weights, dtype=float)
    sums = numpy.asarray(losses, dtype=float) * weights
    ends = [end[0] for end in scoring.bootstrap(sums[:, None], weights)]
    scores = SampleScores(
        samples_sha256=samples, weights=weights.tolist(), scores={figure.name: sums.tolist()}
    )
    measured = figure.measured({"tuned": dict(zip(("value", "low", "high"), ends, strict=True))})
    return Scored(figures=[measured], scores=scores, scale=scale)


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    """List of changes: one point fails in each stage, and two succeed."""
    broken = tmp_path_factory.mktemp("broken") / "pairs.jsonl"
    broken.write_text('{"instruction": "a", "output": "b"}\n' + "no JSON\n" * 40)
    return [
        {"training.learning_rate": 1e-2},
        {
            "training.learning_rate": 1e-9,
            "training.max_loss_jump": 1.0 + 1e-6,
            "training.max_steps": 16,
        },  # a bad loss
        {"sharding": "device_map"},
        {"training.learning_rate": 1e-9},
        {"data.path": str(broken)},
    ]


def check_table(found, broken):
    """Check that each point of `changes` that failed has failed only its own row; `broken` is the file that
    cannot be read."""
    assert found.best == "tiny-1"
    assert [not outcome.has_failed for outcome in found.outcomes] == [True, False, False, True, False]
    assert "method full with sharding device_map" in found.outcomes[2].reason
    assert found.outcomes[1].reason.startswith("train: ")
    assert "bad loss" in found.outcomes[1].reason.lower()
    assert found.outcomes[4].reason.startswith("prepare: ")
    assert broken in found.outcomes[4].reason
    assert not [
        outcome
        for outcome in found.outcomes
        if "Error encountered" in outcome.reason or "Traceback" in outcome.reason
    ]
