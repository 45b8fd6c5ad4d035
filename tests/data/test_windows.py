"""Windows of data: which days a kickoff chooses, and what is left of them where files are missing."""

from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytune import data
from flytune.data import windows
from flytune.errors import DataError
from tests.support.plans import recipe_of

KICKOFF = datetime(2026, 3, 29, 2, 0, 2, tzinfo=UTC)
DAILY = "s3://bucket/chats/%Y-%m-%d.jsonl"


def paths(recipe):
    return [source.path for source in recipe.data.all_sources.values()]


def render(recipe, kickoff, days):
    return windows.render(recipe, kickoff, days, exists=lambda path: True).recipe


def test_the_days_before_the_kickoff_s_own_oldest_first():
    recipe = render(recipe_of(data={"path": DAILY}), KICKOFF, 3)
    assert paths(recipe) == [f"s3://bucket/chats/2026-03-{day}.jsonl" for day in (26, 27, 28)]
    assert recipe.data.path is None


@given(
    st.datetimes(datetime(1990, 1, 1), datetime(2090, 1, 1)),
    st.integers(1, 40),
    st.integers(-12 * 60, 12 * 60),
)
def test_no_day_is_read_twice_or_never_whatever_the_zone_and_season(moment, days, minutes):
    recipe = recipe_of(data={"path": DAILY})
    kickoff = moment.replace(tzinfo=UTC)
    found = [date.fromisoformat(path[-16:-6]) for path in paths(render(recipe, kickoff, days))]
    assert found == [kickoff.date() - timedelta(days=back) for back in range(days, 0, -1)]
    # The same moment, as another zone writes it, or none.
    zone = timezone(timedelta(minutes=minutes))
    assert render(recipe, kickoff.astimezone(zone), days) == render(recipe, moment, days)
    # Tomorrow's window begins where this one ends, less the first day.
    later = [
        date.fromisoformat(path[-16:-6]) for path in paths(render(recipe, kickoff + timedelta(days=1), days))
    ]
    assert later == [*found[1:], kickoff.date()]


def test_hours_months_and_what_is_no_code():
    hours = paths(render(recipe_of(data={"path": "/d/%Y%m%d/%H.jsonl"}), KICKOFF, 2))
    assert (len(hours), hours[0], hours[-1]) == (48, "/d/20260327/00.jsonl", "/d/20260328/23.jsonl")
    assert paths(render(recipe_of(data={"path": "/d/%Y-%m.jsonl"}), KICKOFF, 40)) == [
        "/d/2026-02.jsonl",
        "/d/2026-03.jsonl",
    ]
    for path in ("s3://bucket/a%20b.jsonl", "/d/100%.jsonl"):
        recipe = recipe_of(data={"path": path})
        assert render(recipe, KICKOFF, 2) == recipe


def test_all_that_was_said_of_the_path_holds_for_each_day():
    told = {
        "path": DAILY,
        "format": "instruction",
        "columns": {"output": "answer"},
        "max_samples": 9,
        "max_length": 64,
    }
    recipe = render(recipe_of(data=told), KICKOFF, 2)
    for source in recipe.data.sources:
        assert (source.format, source.columns, source.max_samples) == ("instruction", {"output": "answer"}, 9)
    assert recipe.data.max_length == 64
    # The held-out file is read as the recipe's own fields say.
    recipe = render(recipe_of(data=told | {"heldout_path": "/h.jsonl"}), KICKOFF, 2)
    assert (recipe.data.format, recipe.data.columns) == ("instruction", {"output": "answer"})


def test_of_several_sources_only_those_with_codes_are_windows():
    sources = [{"path": "/fixed.jsonl", "weight": 0.5}, {"path": DAILY, "weight": 2.0}]
    recipe = render(recipe_of(data={"sources": sources}), KICKOFF, 2)
    assert paths(recipe)[0] == "/fixed.jsonl"
    assert [source.weight for source in recipe.data.sources] == [0.5, 2.0, 2.0]


def test_days_without_a_file_are_left_out_and_told(tmp_path):
    recipe = recipe_of(data={"path": f"{tmp_path}/%Y-%m-%d.jsonl"})
    assert windows.render(recipe, KICKOFF, 2) == (
        None,
        [f"{tmp_path}/2026-03-27.jsonl", f"{tmp_path}/2026-03-28.jsonl"],
    )
    (tmp_path / "2026-03-28.jsonl").write_text('{"text": "a"}\n')
    window = windows.render(recipe, KICKOFF, 2)
    assert (paths(window.recipe), window.missing) == (
        [f"{tmp_path}/2026-03-28.jsonl"],
        [f"{tmp_path}/2026-03-27.jsonl"],
    )
    assert len(data.fingerprint(window.recipe.data)) == 64
    fixed = recipe_of(data={"path": str(tmp_path)})
    assert windows.render(fixed, KICKOFF, 2) == (fixed, [])


def test_mistakes_are_told():
    with pytest.raises(DataError, match="days: 0: a window has at least one day"):
        windows.render(recipe_of(), KICKOFF, 0)
    with pytest.raises(DataError, match="nosuch://x/2026-03-28: cannot be reached"):
        windows.render(recipe_of(data={"path": "nosuch://x/%Y-%m-%d"}), KICKOFF, 1)
