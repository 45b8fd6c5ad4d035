import os
import signal
from types import SimpleNamespace

import pytest

from flytune.errors import Preempted
from flytune.hardware.shapes import shape_named
from flytune.recipe.sections import Checkpoints
from flytune.training import preemption
from flytune.training.preemption import Stopper
from tests.support import ranks
from tests.support.ranks import ALONE


class Trainer:
    """As much of one as a stopper sees: its saves take `seconds` of a clock that only they and the tests move.

    Its `saver` has stored a checkpoint once it is saved, which takes `store_seconds` beside training.
    """

    def __init__(self, clock, seconds, saved_step=0, store_seconds=0.0):
        self.state, self._clock, self._seconds = SimpleNamespace(global_step=0), clock, seconds
        self.saver = SimpleNamespace(saved_step=saved_step, store_seconds=store_seconds)

    def _save_checkpoint(self):
        self._clock[0] += self._seconds
        self.saver.saved_step = self.state.global_step


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])
    return now


def steps_saved(stopper, trainer, clock, step_seconds, steps):
    saved = []
    for step in range(1, steps + 1):
        clock[0] += step_seconds
        trainer.state.global_step = step
        if stopper.end_step(step, ALONE)[0]:
            trainer._save_checkpoint()
            saved.append(step)
    return saved


def test_auto_saves_early_then_as_often_as_loses_least(clock):
    shape = shape_named("a10g-8").model_copy(update={"interruptions_per_hour": 1.0})
    stopper, trainer = Stopper(Checkpoints(save_steps="auto"), shape), Trainer(clock, seconds=5.0)
    stopper.begin(trainer, trainer.saver, 0)
    # sqrt(2 x 5 x 3600) = 190 s, less the save: 186.7 s, or 19 steps.
    assert steps_saved(stopper, trainer, clock, 10.0, 60) == [2, 21, 40, 59]


def test_a_number_of_steps_is_the_trainer_s_to_keep(clock):
    stopper, trainer = Stopper(Checkpoints(save_steps=3), shape_named("cpu-1")), Trainer(clock, seconds=5.0)
    stopper.begin(trainer, trainer.saver, 0)
    assert steps_saved(stopper, trainer, clock, 10.0, 12) == []


def stop_after(clock, save_seconds, waited, store_seconds=0.0, lands=True):
    trainer = Trainer(clock, save_seconds, saved_step=20, store_seconds=store_seconds)
    stopper = Stopper(Checkpoints(save_steps=10), shape_named("cpu-1"))
    with stopper.listening():
        stopper.begin(trainer, trainer.saver, 20)
        trainer.state.global_step = 30
        trainer._save_checkpoint()
        assert stopper.end_step(30, ALONE) == (False, False)
        os.kill(os.getpid(), signal.SIGTERM)
        clock[0] += waited
        told = stopper.end_step(33, ALONE)
        trainer.state.global_step = 33
        if told[0] and lands:
            trainer._save_checkpoint()
        with pytest.raises(Preempted) as caught:
            stopper.end()
    return told, str(caught.value)


def test_sigterm_saves_where_the_grace_holds_it(clock):
    told, message = stop_after(clock, save_seconds=4.0, waited=8.0)
    assert told == (True, True)
    assert message == "rank 0: SIGTERM: step 33 is saved, 22.0 s of 30 were left for it"


def test_a_save_that_does_not_fit_is_not_begun_and_its_loss_is_told(clock):
    told, message = stop_after(clock, save_seconds=25.0, waited=8.0)
    assert told == (False, True)
    assert message == (
        "rank 0: SIGTERM after step 33: a save takes 25.0 s, 22.0 of 30 s are left; steps 31 to 33 are lost, the next attempt "
        "goes on from step 30"
    )


def test_storing_beside_training_counts_within_the_grace(clock):
    told, message = stop_after(clock, save_seconds=4.0, waited=8.0, store_seconds=19.0)
    assert told == (False, True)
    assert "a save takes 23.0 s, 22.0 of 30 s are left" in message


def test_a_last_checkpoint_that_did_not_land_is_not_called_saved(clock):
    _, message = stop_after(clock, save_seconds=4.0, waited=8.0, lands=False)
    assert "its last checkpoint was not stored in time; steps 31 to 33 are lost" in message


def test_sigterm_before_the_first_step_ends_at_once():
    stopper = Stopper(Checkpoints(save_steps=10), shape_named("cpu-1"))
    with stopper.listening(), pytest.raises(Preempted, match="there is nothing to save; no step is lost"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def agree():
    """Rank 1 alone gets the signal."""
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    stopper, rank = Stopper(Checkpoints(save_steps=10), shape_named("cpu-2")), torch.distributed.get_rank()
    with stopper.listening():
        trainer = Trainer([0.0], 0.0)
        stopper.begin(trainer, trainer.saver, 0)
        args, found = SimpleNamespace(world_size=2, device="cpu"), []
        for step in range(1, 5):
            if (rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGTERM)
            found.append(stopper.end_step(step, args))
    return found


def test_all_ranks_stop_at_the_step_at_which_one_was_told_to():
    assert ranks.run(2, agree) == [(False, False), (False, False), (True, True), (True, True)]
