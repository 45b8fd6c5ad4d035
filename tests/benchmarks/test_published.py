"""The table of published and planned figures on docs/recipes.md, and the sources of its settings."""

import pytest

from benchmarks import measured_runs, published
from tests.support.recipes import RECIPES
from training_estimates import memory


def test_the_page_has_the_current_table():
    page = published.PAGE.read_text(encoding="utf-8")
    assert published.BEGIN in page
    assert page == published.with_table(page), "run `python -m benchmarks.published --write`"


def test_every_recipe_of_a_published_run_is_in_the_table():
    repeated = {path.stem for path in RECIPES if "\n# Differs:" in path.read_text(encoding="utf-8")}
    assert repeated == {system.recipe for system in published.SYSTEMS}


def test_a_figure_is_shown_with_both_ratios_and_a_dash_where_there_is_none():
    cells = published.Line("x", "GPU memory, GB", 80.0, 60.0, None).cells()
    assert cells == ["[x](../recipes/x.yaml)", "GPU memory, GB", "80", "60.0", "0.75", "–", "–"]


@pytest.mark.parametrize(("row", "share"), [("766", (0.9, 1.0)), ("773", (0.95, 1.1))])
def test_the_published_settings_give_nearly_the_published_memory(row, share):
    (run,) = (run for run in measured_runs.read()[0] if run.row == row)
    # Of the LoRA run the range is known: 72 GB at the least.
    least = run.allocated_gib or 72e9 / 2**30
    assert share[0] <= memory.memory(run.workload).allocated / 2**30 / least <= share[1]
