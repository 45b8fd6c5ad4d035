import contextlib
import functools

import pytest

from flytune import data
from flytune.data import Stream
from flytune.errors import BadLoss, TrainingError
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import Recipe, Training
from flytune.records import NodeAttempt
from flytune.training import AttemptWriter, attempt_notes, checkpoints, loop
from flytune.training.attempt_notes import Notes
from flytune.training.loss_guards import LossGuard
from tests.support import ranks
from tests.support.plans import plan_of
from tests.support.ranks import ALONE
from tests.support.tiny import tiny_recipe


def training_of(**changes):
    return Training.model_validate({"learning_rate": 1e-3, "global_batch_size": 2, "max_steps": 20} | changes)


class Rows:
    """Row i of a data set is the number i."""

    column_names = ("input_ids",)

    def __len__(self):
        return 12

    def __getitems__(self, places):
        return [{"input_ids": [place]} for place in places]


def guarded(tmp_path, notes=None, can_overflow=False, **changes):
    training = training_of(**changes)
    stream = Stream(Rows(), training)
    stream.left_out = (notes or Notes()).left_out
    writer = AttemptWriter(str(tmp_path), goes_on=True)
    leave_out = functools.partial(writer.leave_out, order="o")
    guard = LossGuard(training, stream, notes or Notes(), leave_out, ALONE, can_overflow)
    guard.writer = writer
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "said"),
    [
        (
            float("nan"),
            1.0,
            "step 5: the loss is nan; the run does not continue and nothing is stored. Lower",
        ),
        (
            1.0,
            float("inf"),
            "step 5: the gradients' norm is inf, and the weights are ruined; the run does not",
        ),
        (3.3, 1.0, r"step 5: the loss is 3.3, 3.0 times the usual 1.1 \(training.max_loss_jump 2\); the run"),
    ],
)
def test_a_bad_loss_stops_the_run_and_says_which(loss, norm, said, tmp_path):
    guard = guarded(tmp_path, max_loss_jump=2)
    for step, fine in enumerate((1.0, 1.2, 1.1, 1.1), 1):
        guard.check(step, lambda: 0, fine, 1.0)
    with pytest.raises(BadLoss, match=said) as caught:
        guard.check(5, lambda: 4, loss, norm)
    assert not caught.value.goes_on


def test_losses_that_vary_or_have_no_predecessors_are_fine(tmp_path):
    guard = guarded(tmp_path, max_loss_jump=2)
    for step, loss in enumerate((9.0, 1.0, 9.0, 1.0, 8.0), 1):
        guard.check(step, lambda: 0, loss, None)
    guard = guarded(tmp_path, max_loss_jump=2)
    for step, loss in enumerate((0.5, 0.0, 0.0, 0.0, 0.01), 1):
        guard.check(step, lambda: 0, loss, None)
    guarded(tmp_path, can_overflow=True).check(1, lambda: 0, 1.0, float("inf"))


def test_skip_notes_the_data_since_the_last_checkpoint(tmp_path):
    guard = guarded(tmp_path, notes=Notes(left_out=[3], rollbacks=1), on_bad_loss="skip")
    message = (
        "step 6: the loss is nan; the next attempt goes back to step 4 and skips the data of steps 5 to 6"
    )
    (tmp_path / "notes.json").write_text('{"left_out": [3], "rollbacks": 1, "order": "o"}')
    with pytest.raises(BadLoss, match=message) as caught, guard.writer.keeping():
        guard.check(6, lambda: 4, float("nan"), None)
    assert caught.value.goes_on
    # Steps 5 and 6 trained turns 5 and 6 of the data, as turn 3 was skipped.
    assert attempt_notes.read(str(tmp_path), "o") == Notes(left_out=[3, 5, 6], rollbacks=2)
    assert attempt_notes.read(str(tmp_path), "p") == Notes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"rollbacks": 1, "rollbacks": 2}', "the key 'rollbacks' is there twice"),
        ("{", "not JSON"),
        ('{"per_device_train_batch_size": []}', "per_device_train_batch_size: must be an integer"),
        ('{"left_out": [-1]}', "must be 0 or greater"),
        ('{"rollbacks": -1}', "rollbacks: must be 0 or greater"),
    ],
)
def test_damaged_notes_are_refused(text, said, tmp_path):
    (tmp_path / "notes.json").write_text(text)
    with pytest.raises(TrainingError, match="notes.json: not the record of an earlier attempt: ") as caught:
        attempt_notes.read(str(tmp_path))
    assert said in str(caught.value)


@pytest.mark.parametrize(("size", "used"), [(None, 8), (9, 8), (8, 8), (4, 4), (3, 2), (1, 1)])
def test_a_noted_micro_batch_keeps_the_global_batch(size, used):
    plan = plan_of(training={"learning_rate": 1e-4, "global_batch_size": 8, "per_device_train_batch_size": 8})
    made = Notes(per_device_train_batch_size=size).applied(plan)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (used, 8 // used)


def test_the_fourth_rollback_is_refused(tmp_path):
    guard = guarded(tmp_path, notes=Notes(rollbacks=3), on_bad_loss="skip")
    with pytest.raises(
        BadLoss, match="data was skipped 3 times already, and the run does not continue"
    ) as caught:
        guard.check(2, lambda: 0, float("nan"), None)
    assert not caught.value.goes_on


def test_the_stream_skips_exactly_those_steps():
    training = training_of()
    whole, cut = Stream(Rows(), training), Stream(Rows(), training)
    cut.left_out = [1, 2, 7]
    turns = [[whole.row_at(2 * turn), whole.row_at(2 * turn + 1)] for turn in range(23)]
    kept = [rows for turn, rows in enumerate(turns) if turn not in cut.left_out]
    assert [[cut.row_at(2 * step), cut.row_at(2 * step + 1)] for step in range(20)] == kept
    assert cut.epochs_after(2) == pytest.approx(4 * 2 / 12)


def test_skip_requires_every_step_to_be_logged():
    with pytest.raises(
        ValueError, match="on_bad_loss: skip needs the loss of each step; set logging_steps to 1"
    ):
        training_of(on_bad_loss="skip", logging_steps=5)


def recipe_for(inputs, folder):
    changes = {"training.max_steps": 4, "training.on_bad_loss": "skip", "training.global_batch_size": 8}
    changes |= {"checkpoints.save_steps": 2, "checkpoints.folder": str(folder)}
    changes |= {"sharding": "ddp", "hardware.shape": "cpu-2"}
    return Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))


def fit(inputs, out, bad_step=None, left_out=None):
    recipe = recipe_for(inputs, out.parent / (f"{out.name}-kept" if left_out else "kept"))
    check = LossGuard.check
    if bad_step:
        LossGuard.check = lambda self, step, saved_step, loss, norm: check(
            self, step, saved_step, float("nan") if step == bad_step else loss, norm
        )
    if left_out:
        attempt_notes.read = lambda *given, **named: Notes(left_out=left_out)
    plan = planner.make(recipe)
    return loop.fit(recipe, plan, shape_named(plan.shape), inputs / "dataset", out)


@pytest.mark.slow
def test_a_run_goes_back_and_skips_the_data_of_the_bad_step(inputs, tmp_path):
    with pytest.raises(
        ranks.RankFailed, match="BadLoss: step 3: the loss is nan; the next attempt goes back to step 2 and"
    ):
        ranks.run(2, fit, inputs, tmp_path / "bad", 3)
    resumed = ranks.run(2, fit, inputs, tmp_path / "resumed")
    assert resumed.resumed_from_step == 2
    without = ranks.run(2, fit, inputs, tmp_path / "without", None, [2])
    assert [step.loss for step in resumed.steps[2:]] == [step.loss for step in without.steps[2:]]
    with_all = ranks.run(2, fit, inputs, tmp_path / "again", None, [9])
    assert with_all.steps[2].loss != without.steps[2].loss
    (note, _) = sorted(tmp_path.glob("kept/*/attempt-000[12]-0-*.json"))
    assert NodeAttempt.read(note).left_out == [2]
    checkpoints.clear(recipe_for(inputs, tmp_path / "kept"), data.read_manifest(inputs / "dataset"), resumed)
    assert not note.exists()


def test_skipped_data_is_skipped_only_in_the_same_order(tmp_path, caplog):
    (tmp_path / "notes.json").write_text('{"left_out": [3], "rollbacks": 1}')
    assert attempt_notes.read(str(tmp_path), "b").left_out == [3], (
        "an earlier release did not say of which order"
    )
    with contextlib.suppress(BadLoss), (guard := guarded(tmp_path, on_bad_loss="skip")).writer.keeping():
        guard.check(1, lambda: 0, float("nan"), None)
    (tmp_path / "notes.json").unlink()
    assert attempt_notes.read(str(tmp_path), "o") == Notes(left_out=[0], rollbacks=1)
    assert not caplog.text
    assert attempt_notes.read(str(tmp_path), "b") == Notes()
    assert "it is not skipped now" in caplog.text
