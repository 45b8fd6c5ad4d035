"""The intervals of the estimates are those of the published rows of development, and hold what they say of
the others."""

import pytest

from benchmarks import intervals as fitted
from training_estimates.intervals import BANDS


@pytest.fixture(scope="module")
def bands():
    return fitted.bands(with_held_out=True)


def test_the_bands_are_what_the_command_prints(bands):
    assert {name: bands[name] for name in BANDS} == BANDS


def test_the_ends_are_of_development_rows_alone(bands, monkeypatch):
    rows = fitted.ratios()
    # Held-out rows that are off by a factor of nine change no end.
    wrong = {
        name: [(run, ratio * (9 if fitted.held_out(run) else 1)) for run, ratio in row]
        for name, row in rows.items()
    }
    monkeypatch.setattr(fitted, "ratios", lambda *_: wrong)
    after = fitted.bands(with_held_out=True)
    assert {name: band[:3] for name, band in after.items()} == {
        name: band[:3] for name, band in bands.items()
    }
    assert all(after[name].covered < bands[name].covered for name in bands)


@pytest.mark.parametrize("name", BANDS)
def test_nine_of_ten_held_out_rows_are_inside(name):
    assert 0.85 <= BANDS[name].coverage <= 0.95


def test_an_interval_holds_its_level():
    values = [number / 1000 for number in range(1, 1001)]
    low, high = fitted.ends(values)
    assert sum(low <= value <= high for value in values) == pytest.approx(900, abs=20)
    # An end is between two values where the level is: of 35, 0.8 of the way from the first to the second.
    assert fitted.ends([float(number) for number in range(1, 36)]) == pytest.approx((1.8, 34.2), abs=0.011)
    # Of few values it holds all.
    assert fitted.ends([0.97, 1.034]) == (0.97, 1.04)
