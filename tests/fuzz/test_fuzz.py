"""The fuzz test in small: the first inputs of each kind."""

import re

import pytest

from tests.fuzz import isolation
from tests.fuzz.inputs import drawn, run
from tests.fuzz.isolation import Wrong
from tests.fuzz.kinds import KINDS, Samples
from tests.fuzz.removals import REMOVALS
from tests.fuzz.removing import Removal, noticed
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return Samples(tmp_path_factory.mktemp("fuzz") / "samples")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_used_right_or_refused(
    name: str, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What an input may take is `make fuzz`'s to measure, on a machine that does nothing else.
    monkeypatch.setattr(isolation, "SECONDS", 120.0)
    monkeypatch.setattr(isolation, "CLOCK_SECONDS", 600.0)
    failed = [one for one in run(name, 0, 0, samples, count=12) if one.outcome.verdict == "failure"]
    assert not failed, "\n".join(f"{one.command}\n{one.given}\n{one.outcome.text}" for one in failed)


def test_a_seed_draws_the_same_inputs_again(samples: Samples) -> None:
    first, again, other = (drawn("grid", seed, 0, samples) for seed in (1, 1, 2))
    assert repr(first) == repr(again) != repr(other)


QUICK = (
    "memory is counted whole",
    "answers alone are trained",
    "unknown keys are refused",
    "samples are cut to max_length",
    "config.json is compared with the weights",
)
"""Names of removals that the first few inputs notice."""


def _is_noticed(removal: Removal, samples: Samples) -> None:
    found, tried = noticed(removal, 0, samples)
    assert found is not None, f"removed, and none of {tried} inputs of {', '.join(removal.kinds)} fails"


@pytest.mark.parametrize(
    "removal", [removal for removal in REMOVALS if removal.name in QUICK], ids=lambda removal: removal.name
)
def test_a_removed_protection_is_noticed(removal: Removal, samples: Samples) -> None:
    _is_noticed(removal, samples)


def test_each_protection_is_where_it_is_removed() -> None:
    def remove_all() -> None:
        for removal in REMOVALS:
            try:
                removal.remove()
            except Exception as error:
                raise Wrong(f"{removal.name}: {error!r}") from error

    outcome = isolation.run(remove_all)
    assert outcome.verdict == "accepted", outcome.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "removal",
    [removal for removal in REMOVALS if removal.name not in QUICK],
    ids=lambda removal: removal.name,
)
def test_every_removed_protection_is_noticed(removal: Removal, samples: Samples) -> None:
    _is_noticed(removal, samples)


def test_each_protection_of_the_security_page_is_removed() -> None:
    table = [
        line
        for line in (ROOT / "docs" / "security.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    named = {
        name
        for line in table
        for name in re.findall(r"`((?:flytune|tasks|training_estimates)/[\w/]+\.py)", line.split("|")[4])
    }
    assert len(named) > 12
    assert named <= {removal.held_by for removal in REMOVALS}
