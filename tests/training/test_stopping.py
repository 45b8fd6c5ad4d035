import os
import signal
from types import SimpleNamespace

import pytest

from flytune.errors import Preempted
from flytune.hardware import shape_named
from flytune.recipe import Checkpoints
from flytune.training import stopping
from flytune.training.stopping import Stopper
from tests.support import ranks
from tests.support.ranks import ALONE


class Saver:
    """Stand-in for the Saver that takes `seconds` of a clock for a save, and reports `store_seconds` for
    storing it."""

    resumed_seconds = 0.0

    def __init__(self, clock, seconds, saved_step=0, store_seconds=0.0):
        self.saved_step, self.store_seconds = saved_step, store_seconds
        self._clock, self._seconds = clock, seconds

    def save(self, stopper, step):
        with stopper.timing_save():
            self._clock[0] += self._seconds
        self.saved_step = step


def stopper_of(saver, save_steps, shape="cpu-1"):
    shape = shape_named(shape) if isinstance(shape, str) else shape
    return Stopper(Checkpoints(save_steps=save_steps), shape, saver)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    return now


def steps_saved(stopper, saver, clock, step_seconds, steps):
    saved = []
    for step in range(1, steps + 1):
        clock[0] += step_seconds
        if stopper.end_step(step, ALONE)[0]:
            saver.save(stopper, step)
            saved.append(step)
    return saved


def test_auto_saves_early_then_at_the_best_interval(clock):
    shape = shape_named("a10g-8").model_copy(update={"interruptions_per_hour": 1.0})
    saver = Saver(clock, seconds=5.0)
    stopper = stopper_of(saver, "auto", shape)
    stopper.begin(0)
    # sqrt(2 x 5 x 3600) = 190 s, less the save: 186.7 s, or 19 steps.
    assert steps_saved(stopper, saver, clock, 10.0, 60) == [2, 21, 40, 59]


def test_the_trainer_saves_every_so_many_steps(clock):
    saver = Saver(clock, seconds=5.0)
    stopper = stopper_of(saver, 3)
    stopper.begin(0)
    assert steps_saved(stopper, saver, clock, 10.0, 12) == []


def stop_after(clock, save_seconds, waited, store_seconds=0.0, is_stored=True):
    saver = Saver(clock, save_seconds, saved_step=20, store_seconds=store_seconds)
    stopper = stopper_of(saver, 10)
    with stopper.listening():
        stopper.begin(20)
        saver.save(stopper, 30)
        assert stopper.end_step(30, ALONE) == (False, False)
        os.kill(os.getpid(), signal.SIGTERM)
        clock[0] += waited
        decided = stopper.end_step(33, ALONE)
        if decided[0] and is_stored:
            saver.save(stopper, 33)
        with pytest.raises(Preempted) as caught:
            stopper.end()
    return decided, str(caught.value)


def test_sigterm_saves_within_the_grace_period(clock):
    decided, message = stop_after(clock, save_seconds=4.0, waited=8.0)
    assert decided == (True, True)
    assert message == "rank 0: SIGTERM: step 33 is saved, 22.0 s of 30 were left for it"


def test_a_save_that_does_not_fit_is_not_begun_and_the_lost_steps_are_reported(clock):
    decided, message = stop_after(clock, save_seconds=25.0, waited=8.0)
    assert decided == (False, True)
    assert message == (
        "rank 0: SIGTERM after step 33: a save takes 25.0 s, 22.0 of 30 s are left; steps 31 to 33 are lost, "
        "the next attempt resumes from step 30"
    )


def test_storing_counts_within_the_grace_period(clock):
    decided, message = stop_after(clock, save_seconds=4.0, waited=8.0, store_seconds=19.0)
    assert decided == (False, True)
    assert "a save takes 23.0 s, 22.0 of 30 s are left" in message


def test_a_last_checkpoint_that_was_not_stored_is_not_called_saved(clock):
    _, message = stop_after(clock, save_seconds=4.0, waited=8.0, is_stored=False)
    assert "its last checkpoint was not stored in time; steps 31 to 33 are lost" in message


def test_ctrl_c_saves_the_step_however_long_it_takes_and_a_second_one_ends_at_once(clock, capfd):
    saver = Saver(clock, seconds=50.0, saved_step=20)
    stopper = stopper_of(saver, 10)
    before = signal.getsignal(signal.SIGINT)
    with stopper.listening():
        # Until the steps begin, the process's own handler is called.
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            signal.raise_signal(signal.SIGINT)
        capfd.readouterr()
        stopper.begin(20)
        saver.save(stopper, 30)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # as torch's launcher sends it again
        clock[0] += 100.0
        assert stopper.end_step(31, ALONE) == (True, True)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stopper.end()
        assert signal.getsignal(signal.SIGINT) == before
    assert (
        capfd.readouterr().err.strip()
        == "Ctrl-C: this step is completed and saved; press Ctrl-C again to end without"
    )


def test_ctrl_c_ends_at_once_where_no_checkpoints_are_written():
    stopper = stopper_of(Saver([0.0], 0.0), None)
    with stopper.listening():
        stopper.begin(0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_before_the_first_step_ends_at_once():
    stopper = stopper_of(Saver([0.0], 0.0), 10)
    with stopper.listening(), pytest.raises(Preempted, match="there is nothing to save; no step is lost"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def agree():
    """Return the decisions of a rank after each step; only rank 1 gets the signal."""
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    stopper, rank = stopper_of(Saver([0.0], 0.0), 10, "cpu-2"), torch.distributed.get_rank()
    with stopper.listening():
        stopper.begin(0)
        args, found = SimpleNamespace(world_size=2, device="cpu"), []
        for step in range(1, 5):
            if (rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGTERM)
            found.append(stopper.end_step(step, args))
    return found


def test_all_ranks_stop_at_the_step_at_which_one_got_the_signal():
    assert ranks.run(2, agree) == [(False, False), (False, False), (True, True), (True, True)]
