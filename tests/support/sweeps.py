"""Sample points of sweeps, and their scores."""

import math

import pytest

from flytune.records import Score
from flytune.sweeps import grid as sweeps_grid
from tests.support.plans import recipe_of


def drawn(grid=None, changes=(), recipe=None, most=24):
    return sweeps_grid.draw(recipe or recipe_of(), grid or {}, list(changes), most)


def score(loss, reach=0.1):
    values = {"loss": loss, "loss_low": loss - reach, "loss_high": loss + reach}
    return Score(**values, **{name.replace("loss", "perplexity"): math.exp(value) for name, value in values.items()})


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    """List of changes: one point fails in each stage, and two succeed."""
    broken = tmp_path_factory.mktemp("broken") / "pairs.jsonl"
    broken.write_text('{"instruction": "a", "output": "b"}\n' + "no JSON\n" * 40)
    return [
        {"training.learning_rate": 1e-2},
        {"training.learning_rate": 1e3, "training.weight_decay": 1e9, "training.max_steps": 8},  # a loss that is not finite
        {"sharding": "device_map"},
        {"training.learning_rate": 1e-9},
        {"data.path": str(broken)},
    ]
