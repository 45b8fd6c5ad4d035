"""What every objective must do: the specification of the next one, which is tested here without an edit."""

import math
from pathlib import Path

import pytest

from flytune import dryrun
from flytune.data import ROW_KINDS
from flytune.evaluation import score
from flytune.models import heads
from flytune.objectives import OBJECTIVES, objective_of
from flytune.planning import planner
from flytune.recipe import SECTIONS, Recipe
from flytune.records.training import TrainingResult
from tests.support import objective_runs, ranks
from tests.support.classified import write_classified
from tests.support.preferences import write_labelled, write_preferences
from tests.support.prompts import write_prompts
from tests.support.queries import write_queries
from tests.support.tiny import tiny_recipe, write_pairs

WRITERS = {
    "answers": write_pairs,
    "pairs": write_preferences,
    "labelled_answers": write_labelled,
    "prompts": write_prompts,
    "classified": write_classified,
    "queries": write_queries,
}
"""Functions that write rows, by the kind of rows."""


@pytest.fixture(scope="session", params=[*sorted(OBJECTIVES), objective_runs.ON_POLICY])
def inputs(request, tmp_path_factory):
    """Return a folder with a tiny base model, rows and prepared data of one objective."""
    name = request.param
    write = WRITERS[SECTIONS[name.split()[0]].row_kind]
    folder = objective_runs.prepare(tmp_path_factory.mktemp(name.replace(" ", "_")), name, write)
    (folder / "objective").write_text(name)
    return folder


def recipe_for(inputs: Path, method: str = "full", sharding: str = "none", **changes) -> Recipe:
    return objective_runs.recipe_for(inputs, (inputs / "objective").read_text(), method, sharding, **changes)


@pytest.fixture(scope="session")
def run(inputs, tmp_path_factory):
    """Return the recipe of a short run, its folder and its result."""
    recipe = recipe_for(inputs, **{"evaluation.eval_steps": 2, "training.max_steps": 4})
    out = tmp_path_factory.mktemp("run") / "out"
    return recipe, out, ranks.run(1, objective_runs.fit, recipe, inputs, out)


def test_a_section_has_its_behaviour_rows_and_head():
    assert {*OBJECTIVES} == {*SECTIONS}
    for name, section in SECTIONS.items():
        assert OBJECTIVES[name].name == name
        assert section.row_kind in ROW_KINDS
        assert section.head in heads.HEADS


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_its_default_recipe_is_one_word_and_keeps_its_key(name, tmp_path):
    recipes = [
        Recipe.model_validate(tiny_recipe(tmp_path, tmp_path / "rows.jsonl", {"objective": objective}))
        for objective in (name, {"name": name})
    ]
    recipes.append(Recipe.model_validate_json(recipes[0].model_dump_json()))
    assert len({recipe.key() for recipe in recipes}) == 1
    assert len({recipe.to_yaml() for recipe in recipes}) == 1


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_its_figures_are_complete(name, tmp_path):
    recipe = Recipe.model_validate(tiny_recipe(tmp_path, tmp_path / "rows.jsonl", {"objective": name}))
    figures = objective_of(recipe).figures()
    assert len({figure.name for figure in figures}) == len(figures) > 0
    assert any(figure.is_paired for figure in figures), "runs are compared by one"
    assert [figure.name for figure in figures if figure.step == "loss"], "the loss of a step has a unit"
    for figure in figures:
        assert figure.title
        assert figure.better in ("lower", "higher", "neither")


@pytest.mark.slow
def test_a_plan_and_a_dry_run_know_it(inputs):
    recipe = recipe_for(inputs, **{"hardware.shape": "cpu-1"})
    plan = planner.make(recipe)
    assert plan.verdict == "fits"
    traced = dryrun.run(recipe, inputs / "tiny", plan.degrees, 2)
    assert traced.peak_bytes > 0


def test_it_learns_and_logs_its_figures(run):
    recipe, _, result = run
    assert all(math.isfinite(step.loss) for step in result.steps)
    assert len({step.eval_loss for step in result.steps if step.eval_loss is not None}) == 2, (
        "the weights changed"
    )
    for figure in objective_of(recipe).figures():
        if figure.step:
            assert any(getattr(step, figure.step) is not None for step in result.steps), figure.name
    assert result.heldout_loss is not None


def test_its_figures_are_those_of_all_steps_whatever_the_micro_batch(inputs, tmp_path):
    name = (inputs / "objective").read_text()
    objective = objective_runs.section_of(name, inputs)
    # Some micro batches have no trained token then.
    objective |= {"mask_truncated_completions": True} if name == "grpo" else {}
    recipe = recipe_for(inputs, objective=objective, **{"training.max_steps": 5, "training.logging_steps": 2})
    rows = recipe.training.global_batch_size
    whole, single = (
        ranks.run(1, objective_runs.fit, recipe, inputs, tmp_path / str(layout[0]), layout)
        for layout in ((rows, 1), (1, rows))
    )
    assert [step.step for step in whole.steps] == [1, 2, 4, 5], "the last one too"
    figures = [figure.step for figure in objective_of(recipe).figures() if figure.step]
    for name in figures:
        of_whole, of_single = ([getattr(step, name) for step in run.steps] for run in (whole, single))
        close = [value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6) for value in of_whole]
        assert of_single == close, name


def test_what_is_exported_is_scored_by_its_figures_and_described(run, inputs):
    recipe, out, result = run
    assert isinstance(result, TrainingResult)
    metrics = score.score(recipe, out, inputs / "dataset")
    known = [figure.name for figure in objective_of(recipe).figures()]
    measured = [figure.name for figure in metrics.figures]
    assert measured, "figures of the export"
    assert [name for name in known if name in measured] == measured, "in its order"
    assert all(math.isfinite(figure.tuned.value) for figure in metrics.figures)
    card = objective_runs.card_of(recipe, result, out, inputs, metrics)
    assert metrics.figures[0].title.lower() in card.lower()
    assert "None" not in card


@pytest.mark.slow
def test_two_processes_compute_what_one_does(inputs, tmp_path):
    found = [
        ranks.run(
            world_size, objective_runs.fit, recipe_for(inputs, "full", sharding), inputs, tmp_path / sharding
        )
        for world_size, sharding in ((1, "none"), (2, "ddp"))
    ]
    alone, together = ([step.loss for step in one.steps] for one in found)
    # Losses of drawn answers are differences that are near 0.
    assert together == pytest.approx(alone, rel=1e-4, abs=1e-6)
    assert found[1].heldout_loss == pytest.approx(found[0].heldout_loss, rel=1e-4)


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(inputs, tmp_path):
    objective_runs.check_resume(inputs, "none", tmp_path, objective=(inputs / "objective").read_text())
