"""The count of evaluations without a lower loss, compared with transformers' own callback."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flytune.recipe import Evaluation
from flytune.records import Step
from flytune.training.stopping import EarlyStopping
from tests.support.stages import training_result


def stopping(patience, threshold=0.0):
    return EarlyStopping(
        Evaluation(eval_steps=1, early_stopping_patience=patience, early_stopping_threshold=threshold)
    )


def of_transformers(losses, patience, threshold):
    """Return the number of evaluations after which transformers' callback ends training; None if it does
    not."""
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

    callback, state, control = EarlyStoppingCallback(patience, threshold), TrainerState(), TrainerControl()
    args = SimpleNamespace(greater_is_better=False, metric_for_best_model="loss")
    for number, loss in enumerate(losses, 1):
        callback.on_evaluate(args, state, control, {"eval_loss": loss})
        if control.should_training_stop:
            return number
        # Trainer._determine_best_metric, after the callbacks.
        if state.best_metric is None or loss < state.best_metric:
            state.best_metric = loss
    return None


@settings(max_examples=60)
@given(
    losses=st.lists(st.integers(0, 6).map(float), max_size=12),
    patience=st.integers(1, 4),
    threshold=st.sampled_from([0.0, 1.0, 2.0]),
    cut=st.integers(0, 12),
)
def test_it_ends_where_transformers_callback_ends_with_a_resume_anywhere(losses, patience, threshold, cut):
    ends, mine = None, stopping(patience, threshold)
    steps = training_result(12).steps
    for number, loss in enumerate(losses, 1):
        if number == cut:
            done = [
                step.model_copy(update={"eval_loss": one})
                for step, one in zip(steps, losses[: cut - 1], strict=False)
            ]
            mine = stopping(patience, threshold)
            mine.resume(Step.model_validate_json(step.model_dump_json()) for step in done)
        mine.count(number, loss)
        if mine.is_due:
            ends = number
            break
    assert ends == of_transformers(losses, patience, threshold)


def test_a_loss_that_is_no_number_is_never_the_lowest():
    mine = stopping(2)
    for step, loss in enumerate((float("nan"), 3.0, float("nan"), 3.5), 1):
        mine.count(step, loss)
    assert (mine.best, mine.counter, mine.is_due) == ((2, 3.0), 2, True)


@pytest.mark.parametrize(
    ("threshold", "said"),
    [
        (
            0.0,
            "2 evaluations in a row did not lower eval_loss (lowest: 3.0000, at step 10); training ended "
            "after step 30",
        ),
        (
            0.5,
            "2 evaluations in a row did not lower eval_loss by more than 0.5 (lowest: 3.0000, at step 10); "
            "training ended",
        ),
    ],
)
def test_the_reason_names_the_lowest_loss(threshold, said):
    mine = stopping(2, threshold)
    for step, loss in ((10, 3.0), (20, 3.2), (30, 3.1)):
        mine.count(step, loss)
    assert said in mine.describe(30)
