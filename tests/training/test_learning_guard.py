"""Runs that cannot learn, trained for real."""

import pytest

from flytune.errors import TrainingError
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.training import loop, loss_guards
from tests.support import ranks
from tests.support.tiny import tiny_recipe


def fit(recipe, inputs, out, factor):
    """Train with a loss that is multiplied with `factor`; its gradients too."""
    from flytune.training import trainer

    kind = trainer.trainer_class("sft")
    compute = kind.compute_loss

    def scaled(self, *args, **kwargs):
        found = compute(self, *args, **kwargs)
        return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor

    kind.compute_loss = scaled
    plan = planner.make(recipe)
    return loop.fit(recipe, plan, shape_named(plan.shape), inputs / "dataset", out)


@pytest.mark.parametrize(
    ("sharding", "steps", "said"),
    [
        ("none", 3, "the gradients of all 3 "),
        ("ddp", 3, "the gradients of all 3 "),
        ("fsdp", 12, "step 10: the gradients of the last 10 steps were 0"),
        pytest.param(
            "zero2", 12, "step 10: the gradients of the last 10 steps were 0", marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_without_gradients_stops_and_exports_nothing(sharding, steps, said, inputs, tmp_path):
    changes = {"sharding": sharding, "training.max_steps": steps, "training.global_batch_size": 4}
    changes |= {"training.num_train_epochs": 9, "hardware.shape": "cpu-1" if sharding == "none" else "cpu-2"}
    recipe = Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))
    with pytest.raises(ranks.RankFailed, match=said):
        ranks.run(1 if sharding == "none" else 2, fit, recipe, inputs, tmp_path / "out", 0.0)
    assert not (tmp_path / "out" / "training.json").exists()


def test_a_run_whose_steps_change_no_weight_exports_nothing(inputs, tmp_path):
    recipe = Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl"))
    # Less than a recipe may have, and less than float32 can add to a weight.
    recipe = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"learning_rate": 1e-30})}
    )
    with pytest.raises(ranks.RankFailed, match="3 steps changed no weight"):
        ranks.run(1, fit, recipe, inputs, tmp_path / "out", 1.0)


def test_steps_without_a_gradient_are_counted_in_a_row():
    guard = loss_guards.LearningGuard()
    for norm in (*[0.0] * 9, 1.0, None, *[0.0] * 9):
        guard.count(norm)
    guard.check(20)
    guard.count(0.0)
    with pytest.raises(TrainingError, match="step 21: the gradients of the last 10 steps were 0"):
        guard.check(21)


def test_gradients_that_always_overflow_stop_the_run():
    guard = loss_guards.LearningGuard()
    for _ in range(loss_guards.MOST_OVERFLOWED):
        guard.count(float("inf"))
    with pytest.raises(
        TrainingError, match="the float16 gradients of the last 100 steps overflowed at every scale"
    ):
        guard.check(100)
