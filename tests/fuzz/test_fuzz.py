"""The fuzz test in small: the first inputs of each kind."""

import pytest

from tests.fuzz.inputs import drawn, run
from tests.fuzz.kinds import KINDS, Samples


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return Samples(tmp_path_factory.mktemp("fuzz") / "samples")


@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_used_right_or_refused(name: str, samples: Samples) -> None:
    failed = [one for one in run(name, 0, 0, samples, count=12) if one.outcome.verdict == "failure"]
    assert not failed, "\n".join(f"{one.command}\n{one.given}\n{one.outcome.text}" for one in failed)


def test_a_seed_draws_the_same_inputs_again(samples: Samples) -> None:
    first, again, other = (drawn("grid", seed, 0, samples) for seed in (1, 1, 2))
    assert repr(first) == repr(again) != repr(other)
