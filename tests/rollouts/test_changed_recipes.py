"""Answers that an attempt finds recorded, and that its recipe would have drawn or judged otherwise."""

import shutil

import pytest

from tests.support import changed_base, objective_runs, ranks, rollout_kills, saved_runs
from tests.support.prompts import section, write_prompts

BROKEN = "def judge(completion, prompt, **columns):\n    return 97.0 + len(completion) % 2\n"
MENDED = "def judge(completion, prompt, **columns):\n    return -90.0 - len(completion) % 2\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return objective_runs.prepare(tmp_path_factory.mktemp("rollouts"), "grpo", write_prompts)


def judged_by(code, **changes):
    return section(rewards=[{"name": "judge", "code": code}], **changes)


def started_twice(inputs, folder, first, second, step, save_steps):
    """Return the result of a run whose recipe changes when the answers of `step` are recorded, and the steps
    that it drew."""
    usual = {"checkpoints.name": "run", "checkpoints.save_steps": save_steps}
    recipes = [
        saved_runs.recipe_for(inputs, "none", folder / "kept", **usual | changes)
        for changes in (first, second)
    ]
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(1, rollout_kills.fit_and_die_with_answers_of, recipes[0], inputs, folder / "killed", step)
    return ranks.run(1, rollout_kills.fit_and_note_drawn, recipes[1], inputs, folder / "out")


@pytest.mark.parametrize(
    ("changes", "drawn"),
    [
        ({"objective": judged_by(MENDED)}, [1, 2, 3, 4]),
        pytest.param({"objective": judged_by(BROKEN, temperature=0.5)}, [1, 2, 3, 4], marks=pytest.mark.slow),
        pytest.param(
            {"objective": judged_by(BROKEN, max_completion_length=5)}, [1, 2, 3, 4], marks=pytest.mark.slow
        ),
        pytest.param({"objective": judged_by(BROKEN, top_p=0.5)}, [1, 2, 3, 4], marks=pytest.mark.slow),
        # The answers of step 1 are of the untrained model, whatever trains it.
        ({"objective": judged_by(BROKEN), "training.learning_rate": 1e-2}, [2, 3, 4]),
        pytest.param(
            {"objective": judged_by(BROKEN), "checkpoints.save_total_limit": 5},
            [3, 4],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_answers_are_drawn_again_where_the_recipe_would_have_others(changes, drawn, inputs, tmp_path):
    result, steps = started_twice(
        inputs, tmp_path, {"objective": judged_by(BROKEN)}, changes, step=2, save_steps=4
    )
    assert steps == drawn
    if changes["objective"] == judged_by(MENDED):
        assert all(-91 <= step.reward <= -90 for step in result.steps), (
            "97 of the earlier attempt are not trained"
        )


def test_answers_are_of_the_weights_that_trained_to_them(inputs, tmp_path):
    """The checkpoint is of step 2, steps 3 and 4 are recorded: those of step 3 are of the weights that both
    attempts have."""
    second = {"objective": judged_by(BROKEN), "training.learning_rate": 1e-2}
    result, steps = started_twice(
        inputs, tmp_path, {"objective": judged_by(BROKEN)}, second, step=4, save_steps=2
    )
    assert (result.resumed_from_step, steps) == (2, [4])


def test_answers_of_another_base_are_drawn_again(inputs, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(inputs, own)
    first = {"objective": judged_by(BROKEN), "model.name_or_path": str(own / "tiny")}

    usual = {"checkpoints.name": "run", "checkpoints.save_steps": 4}
    recipe = saved_runs.recipe_for(own, "none", tmp_path / "kept", **usual | first)
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(1, rollout_kills.fit_and_die_with_answers_of, recipe, own, tmp_path / "killed", 2)
    changed_base.change_weights(own / "tiny")
    _, steps = ranks.run(1, rollout_kills.fit_and_note_drawn, recipe, own, tmp_path / "out")
    assert steps == [1, 2, 3, 4]
