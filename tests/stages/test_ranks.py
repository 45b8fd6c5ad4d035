"""Ranks of several nodes meet; nothing of the parent's is left in forked ones that would change a run."""

import atexit
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch

from flytune import data
from flytune.errors import ExportError
from flytune.hardware import devices, shape_named
from flytune.models import clean_process
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.stages import calls, ranks
from flytune.stages.local import ThisMachine
from flytune.training import libraries
from tasks.runtime.orchestrator import FLYTE
from tests.support import ranks as support_ranks
from tests.support.paths import ROOT
from tests.support.process_kills import end_at_once
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

MACHINE = ThisMachine(ROOT)
NODE = """
import os
from flytune.stages import ranks
try:
    print("rank 0 returned", ranks.start(os.getcwd, nodes=2, processes=1, forks=False, inputs={}))
except ranks.NoResult:
    print("the other node has the result")
"""


def test_nodes_that_know_the_endpoint_alone_are_one_job():
    # What the training operator gives Flyte 2's pods: nobody sets PET_RDZV_ID, and the endpoint names job and
    # attempt.
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"PET_RDZV_ENDPOINT": f"localhost:{port}", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "2:2"}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = sorted(node.communicate(timeout=300)[0].strip() for node in nodes)
    assert said == [f"rank 0 returned {ROOT}", "the other node has the result"]


def shown(orchestrator, report):
    report(f"rank {os.environ['RANK']}")
    return orchestrator.is_local()


@pytest.mark.slow
def test_the_page_of_rank_0_is_the_stage_s():
    pages = []
    call = calls.Call(shown, MACHINE, {}, shape_named("cpu-2"), processes=2)
    assert call.run(pages) == (True, ["rank 0"])
    assert pages == ["rank 0"]


@pytest.fixture
def clean(monkeypatch):
    """This process as one that has not computed."""
    for name, value in {"has_computed": False, "has_trained": False, "pool": None}.items():
        monkeypatch.setattr(clean_process._State, name, value)
    yield
    if clean_process._State.pool is not None:
        clean_process._State.pool.shutdown()


def in_fork(function, *arguments):
    """Return the result of a function in a forked process that ends as ranks do, without the exit functions
    of Python."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    if (pid := os.fork()) == 0:
        try:
            sender.send(function(*arguments))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert receiver.poll(), "the process failed"
    return receiver.recv()


def test_a_rank_has_no_handlers_and_exit_functions_of_its_parent(tmp_path):
    atexit.register(parents := tmp_path.joinpath("parent").touch)
    before = signal.signal(signal.SIGTERM, lambda *_: None)

    def rank():
        atexit.register(tmp_path.joinpath("tracker").touch)
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    try:
        handlers = in_fork(ranks.in_rank(rank))
    finally:
        signal.signal(signal.SIGTERM, before)
        atexit.unregister(parents)
    assert handlers == [signal.SIG_DFL, signal.SIG_DFL]
    assert [path.name for path in tmp_path.iterdir()] == ["tracker"]


def test_addresses_of_forked_ranks_differ():
    assert in_fork(FLYTE.new_address) != in_fork(FLYTE.new_address)


def test_a_rank_has_the_threads_of_torchrun(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert in_fork(ranks.in_rank(torch.get_num_threads)) == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert in_fork(ranks.in_rank(torch.get_num_threads)) == torch.get_num_threads()


@pytest.mark.parametrize(
    ("value", "threads"), [("1,2", 1), (" 1 ", 1), ("", None), ("0", None), ("many", None), ("-1", None)]
)
def test_a_rank_reads_the_number_of_threads_as_openmp_does(value, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert in_fork(ranks.in_rank(torch.get_num_threads)) == (threads or torch.get_num_threads())


def test_a_process_that_has_computed_forks_no_ranks(clean):
    clean_process.note_training()
    assert ranks.prepare(MACHINE, lambda: None, None, None) is False


def test_errors_of_the_fetch_are_left_to_the_ranks(clean, tmp_path):
    recipe = Recipe.model_validate(tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 8)))
    given = []

    def fetch(**inputs):
        given.append(inputs)
        raise OSError("gone")

    assert ranks.prepare(MACHINE, fetch, recipe, planner.make(recipe), dataset="d", base=None) is True
    assert given == [{"dataset": "d", "base": None}]


def test_cuda_is_not_used_before_the_fork(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert libraries.can_fork()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert libraries.can_fork()  # there is no GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not libraries.can_fork()


def test_the_clean_process_is_the_same_until_it_ends(clean):
    clean_process.fork()
    clean_process.note_training()
    first = clean_process.run(os.getpid)
    assert clean_process.run(os.getpid) == first != os.getpid()
    with pytest.raises(ExportError, match="the process that evaluates ended without an error message"):
        clean_process.run(end_at_once)
    assert clean_process.run(os.getpid) not in (first, os.getpid())


def test_what_a_run_has_trained_with_is_freed_before_another_process_evaluates(tmp_path):
    recipe = Recipe.model_validate(
        tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64))
    )
    data.prepare(DataRequest.of(recipe, "x"), tmp_path / "dataset")
    assert support_ranks.run(1, left_over, recipe, tmp_path / "dataset", tmp_path / "out") == 0


def left_over(recipe, dataset, out):
    """Return the bytes of states that are left of the optimizer."""
    support_ranks.fit(recipe, dataset, out)
    # As a library does that is imported while the trainer exists.
    gc.freeze()
    clean_process.free_memory()
    gc.unfreeze()
    found = [one for one in gc.get_objects() if isinstance(one, torch.optim.Optimizer)]
    return sum(value.nbytes for one in found for state in one.state.values() for value in state.values())


def test_a_gpu_s_memory_is_free_for_the_next_stage(clean, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(clean_process, "free_memory", lambda: freed.append(1))
    freed = []
    assert clean_process.run(os.getpid) == os.getpid()
    clean_process.note_training()
    assert len(freed) == 2


def test_a_process_that_has_used_cuda_looks_at_its_gpus_itself(monkeypatch):
    monkeypatch.setattr(libraries, "can_fork", lambda: False)
    monkeypatch.setattr(devices, "configure_allocator", lambda: None)
    monkeypatch.setattr(devices, "check", lambda shape: looked.append(os.getpid()))
    looked = []
    calls.check_devices(shape_named("a100-80gb-1"))
    assert looked == [os.getpid()]


def test_a_forked_process_does_not_wait_for_the_clean_process_of_its_parent(clean):
    def run():
        signal.alarm(30)
        return clean_process.run(os.getpid) == os.getpid()

    clean_process.fork()
    assert in_fork(run)
