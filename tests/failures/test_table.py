"""The table of failures, compared with errors as the libraries raise them."""

import contextlib
import errno
import os
import signal
import socket
import sqlite3
import time
from multiprocessing.connection import wait as real_wait
from types import SimpleNamespace

import pytest

from flytune import files
from flytune.errors import (
    BadLoss,
    DataError,
    DeviceError,
    EngineError,
    Hang,
    KilledAgain,
    OutOfMemory,
    Preempted,
    PreparedDataError,
    RewardError,
    StorageError,
    StorageFull,
    StorageRefused,
    TrainingError,
)
from flytune.failures import Failure, reports, table
from flytune.records import Plan
from flytune.selftest import processes as ranks_module
from flytune.training import AttemptWriter, attempt_notes, earlier_attempts
from flytune.training.attempt_notes import Notes
from tests.support import ranks
from tests.support.waiting import LIMIT, until


def raised(function):
    try:
        function()
    except Exception as error:  # noqa: BLE001 (all that a library may raise)
        return error
    raise AssertionError("nothing was raised")


def fill_a_full_disk():
    with open("/dev/full", "w") as full:
        full.write("x")
        full.flush()


def load_what_is_not_in_an_offline_cache():
    from huggingface_hub import constants
    from transformers import AutoConfig

    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        AutoConfig.from_pretrained("no/such-model")
    finally:
        constants.HF_HUB_OFFLINE = offline


def hub_answers(status):
    import httpx
    from huggingface_hub import hf_raise_for_status

    request = httpx.Request("GET", "https://huggingface.co/api/models/a/b")
    headers = {"X-Error-Code": "GatedRepo"} if status == 403 else {}
    hf_raise_for_status(httpx.Response(status, request=request, headers=headers))


def storage_answers(code):
    from botocore.exceptions import ClientError

    raise ClientError({"Error": {"Code": code, "Message": "m"}}, "PutObject")


def no_storage():
    import boto3

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    config = boto3.session.Config(retries={"max_attempts": 0})
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=address, config=config, **keys).list_buckets()


def wait_for_clients():
    from datetime import timedelta

    import torch.distributed

    torch.distributed.TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=timedelta(seconds=0.5))


def rendezvous():
    from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

    raise RendezvousTimeoutError


def gpu_is_full():
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def wrapped():
    try:
        gpu_is_full()
    except RuntimeError as error:
        raise TrainingError("the step failed") from error


def throw(error):
    raise error


NCCL_TIMEOUT = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 600 "
    "milliseconds before timing out."
)
CASES = {
    "preempted": [lambda: throw(Preempted("x"))],
    "killed again": [lambda: throw(KilledAgain("x"))],
    "hang": [lambda: throw(Hang("x"))],
    "GPUs not as promised": [lambda: throw(DeviceError("CUDA driver initialization failed"))],
    "bad loss": [lambda: throw(BadLoss("x"))],
    "out of GPU memory": [gpu_is_full, wrapped, lambda: throw(OutOfMemory("x"))],
    "out of host memory": [
        lambda: throw(MemoryError()),
        lambda: throw(OSError(12, "Cannot allocate memory")),
    ],
    "broken GPU": [lambda: throw(RuntimeError("CUDA error: uncorrectable ECC error encountered"))],
    "storage full": [
        fill_a_full_disk,
        lambda: throw(StorageFull("x")),
        lambda: throw(OSError(errno.EFBIG, "File too large")),
        lambda: throw(RuntimeError("Error while serializing: I/O error: Disk quota exceeded (os error 122)")),
        lambda: throw(
            StorageError("own/answers.jsonl: cannot be written: No space left on device; make room")
        ),
        # What torch.save, numpy.save and SQLite raise on a full tmpfs.
        lambda: throw(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")),
        lambda: throw(OSError("1048576 requested and 262112 written")),
        lambda: throw(sqlite3.OperationalError("database or disk is full")),
    ],
    "engine away": [lambda: throw(EngineError("vLLM did not start"))],
    "credentials expired": [lambda: storage_answers("ExpiredToken")],
    "hub refused": [lambda: hub_answers(403), lambda: hub_answers(401)],
    "not handed on": [load_what_is_not_in_an_offline_cache],
    "hub busy": [lambda: hub_answers(429), lambda: hub_answers(503)],
    "cache not writable": [
        lambda: throw(PermissionError(13, "Permission denied", "/home/x/.cache/huggingface/hub")),
        lambda: throw(OSError(30, "Read-only file system", "/home/x/.triton/autotune")),
    ],
    "storage refused": [
        lambda: throw(StorageRefused("x")),
        lambda: storage_answers("AccessDenied"),
        lambda: throw(PermissionError(13, "Permission denied")),
    ],
    "collective timeout": [lambda: throw(RuntimeError(NCCL_TIMEOUT))],
    "rendezvous": [wait_for_clients, rendezvous],
    "storage away": [
        lambda: throw(StorageError("x")),
        no_storage,
        lambda: storage_answers("SlowDown"),
        lambda: throw(OSError(116, "Stale file handle")),
    ],
    "damaged prepared data": [lambda: throw(PreparedDataError("a: incomplete: train/00000.parquet missing"))],
    "bad data": [lambda: throw(DataError("rows.jsonl:3: not JSON"))],
    "bad reward": [lambda: throw(RewardError("reward own: raises ValueError: no such thing"))],
    "refused": [lambda: throw(TrainingError("the plan is for 2 processes"))],
    "bug": [lambda: throw(KeyError("x")), lambda: throw(RuntimeError("shape mismatch"))],
}
FINAL = {
    "killed again",
    "GPUs not as promised",
    "cache not writable",
    "bad loss",
    "out of GPU memory",
    "storage full",
    "hub refused",
    "not handed on",
    "storage refused",
    "damaged prepared data",
    "bad data",
    "bad reward",
    "refused",
}
FINAL |= {"bug"}
DERIVED = {"RendezvousTimeoutError", "EndpointConnectionError"}


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind, cases in CASES.items() for case in range(len(cases))]
)
def test_errors_are_distinguished(kind, case):
    failure = reports.of_error(raised(CASES[kind][case]), rank=1)
    assert failure.kind == kind
    assert failure.recoverable == (kind not in FINAL)
    assert failure.advice
    assert ("Traceback" in failure.details) == (kind == "bug")


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind, cases in CASES.items() for case in range(len(cases))]
)
def test_errors_are_distinguished_by_their_names_too(kind, case):
    error = raised(CASES[kind][case])
    named = table.kind_named(f"{type(error).__name__}: {error}")
    # A name does not contain the errors that it was raised from, nor the bases of other libraries' classes.
    expected = next((kind for kind in table.KINDS if kind.is_of(error)), None)
    assert named == (None if type(error).__name__ in DERIVED else expected)


def test_every_row_of_the_table_is_tested():
    seen_on_ranks = {"peer gone"}
    assert {kind.name for kind in table.KINDS} | {"bug"} == set(CASES) | seen_on_ranks


def kind_when_the_peer(does):
    """Return the kind of rank 0's failure in a collective that rank 1 does not reach in time, or is killed
    before."""
    from datetime import timedelta

    import torch
    from torch.distributed import distributed_c10d

    torch.distributed.init_process_group("gloo")
    torch.distributed.all_reduce(torch.ones(1))
    store = distributed_c10d._get_default_store()
    if torch.distributed.get_rank() == 1:
        if does == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(
            torch.distributed.DistNetworkError
        ):  # rank 0, which has the store, has seen it and ended
            store.wait(["seen"], timedelta(seconds=LIMIT))
        return None
    if does == "sleep":
        distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
    kind = reports.of_error(raised(lambda: torch.distributed.all_reduce(torch.ones(1))), rank=0).kind
    store.set("seen", "")
    return kind


def test_a_late_peer_is_a_timeout():
    assert ranks.run(2, kind_when_the_peer, "sleep") == "collective timeout"


def report_kind(folder):
    files.write_durably(folder / "kind", kind_when_the_peer("die").encode())


def test_a_lost_peer_is_a_consequence_and_not_the_cause(tmp_path, monkeypatch):
    # The process that runs the ranks ends them when the first has died; here, once the other one has seen it.
    monkeypatch.setattr(
        ranks_module,
        "wait",
        lambda *given, **named: until((tmp_path / "kind").exists) or real_wait(*given, **named),
    )
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(2, report_kind, tmp_path)
    assert (tmp_path / "kind").read_text() == "peer gone"


def test_exit_codes_are_distinguished():
    assert reports.of_exit(-signal.SIGKILL, 3).kind == "out of host memory"
    assert (
        reports.of_exit(137, 3).message
        == "ended by SIGKILL, which the kernel sends when a pod is out of memory"
    )
    assert reports.of_exit(-signal.SIGABRT, 3).kind == "collective timeout"
    assert reports.of_exit(-signal.SIGTERM, 3).kind == "preempted"
    crash = reports.of_exit(-signal.SIGSEGV, 3)
    assert (crash.kind, crash.recoverable, crash.message) == ("crash", False, "ended by SIGSEGV")
    assert reports.of_exit(1, 3).message == "ended with exit code 1"


def failure(rank, at, kind="bug", notices=False, details=""):
    return Failure(
        rank=rank,
        time=at,
        kind=kind,
        message="m",
        advice="a",
        recoverable=False,
        notices=notices,
        details=details,
    )


def test_the_cause_is_the_first_failure_that_is_no_lost_peer():
    noticed, late, early = failure(0, 1.0, "peer gone", notices=True), failure(1, 3.0), failure(2, 2.0)
    assert reports.first([noticed, late, early]) is early
    assert reports.first([noticed]) is noticed


def test_a_hang_is_reported_with_the_stacks_of_all_ranks():
    cause = reports.first(
        [failure(1, 1.0, "hang", details="in sleep\n"), failure(0, 2.0, "hang", details="in all_reduce\n")]
    )
    assert str(cause) == "rank 1: hang: m\nwhat to do: a\nrank 0:\nin all_reduce\nrank 1:\nin sleep"


def test_reports_cross_processes_and_the_first_of_a_rank_is_kept(tmp_path, monkeypatch):
    reports.report(failure(0, 1.0))
    monkeypatch.setenv(reports.FOLDER, str(tmp_path))
    monkeypatch.setattr(reports, "SECONDS_AFTER_NOTICING", 0.2)
    started = time.monotonic()
    reports.report(failure(0, 1.0, notices=True))
    assert time.monotonic() - started >= 0.2
    reports.report(failure(0, 2.0))
    (tmp_path / "1.json").write_text("{")
    assert reports.reported(tmp_path) == [failure(0, 1.0, notices=True)]


def test_an_error_that_prepared_the_next_attempt_is_recoverable():
    import pickle

    error = pickle.loads(pickle.dumps(OutOfMemory("rank 1: halved", goes_on=True)))
    found = reports.of_error(error, rank=1)
    assert (found.recoverable, found.message) == (True, "halved")
    assert not reports.of_error(OutOfMemory("too much"), rank=1).recoverable


@pytest.mark.parametrize("address", ["{folder}/new", "memory://notes/run"])
def test_records_are_kept_at_folders_and_addresses(address, tmp_path):
    address = address.format(folder=tmp_path)
    assert attempt_notes.read(address) == Notes()
    with contextlib.suppress(OutOfMemory), AttemptWriter(address, goes_on=True).keeping():
        raise OutOfMemory("x")
    (record,) = earlier_attempts.read(address)
    assert (record.kind, record.reason, record.phase) == ("out of GPU memory", "out of GPU memory: x", "load")
    earlier_attempts.clear(address)
    earlier_attempts.clear(address)
    assert earlier_attempts.read(address) == []


def agree(notes):
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    attempt_notes.check_agreed(
        Notes(rollbacks=rank if notes == "different" else 0),
        SimpleNamespace(world_size=2, process_index=rank),
    )
    return True


def test_ranks_that_read_different_notes_do_not_start():
    assert ranks.run(2, agree, "same")
    with pytest.raises(
        ranks.RankFailed, match=r"attempts differ between them; name a file system that is mounted"
    ):
        ranks.run(2, agree, "different")


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "auto", "said", "noted"),
    [
        (
            4,
            2,
            False,
            "step 7, 4 x 2 .* 2 processes; .* 2 x 4 x 2 processes is the same .* 16: set .*size: 2, or",
            None,
        ),
        (4, 2, True, "2 x 4 x 2 processes is the same .* 16, and the next attempt uses it: CUDA out", 2),
        (3, 5, True, "1 x 15 x 2 processes is the same global batch of 30, and", 1),
        (
            1,
            8,
            True,
            "the run does not continue by itself. No micro batch is smaller: lower data.max_length",
            None,
        ),
    ],
)
def test_out_of_memory_names_the_same_global_batch_in_smaller_batches(
    micro_batch, accumulation, auto, said, noted, tmp_path
):
    plan = Plan.model_construct(
        shape="a",
        global_batch_size=2 * micro_batch * accumulation,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        world_size=2,
        nodes=1,
        price_per_hour=1.0,
        needs=[],
    )
    error = attempt_notes.out_of_memory(plan, 3, 7, goes_on=auto, error=raised(gpu_is_full))
    with (
        pytest.raises(
            OutOfMemory, match=f"rank 3: out of GPU memory at {said if 'step' in said else f'.*{said}'}"
        ),
        AttemptWriter(str(tmp_path), plan, goes_on=True).keeping(),
    ):
        raise error
    assert error.goes_on == (noted is not None)
    notes = attempt_notes.read(str(tmp_path), halves_on="a" if auto else None)
    applied = notes.applied(plan)
    assert applied.per_device_train_batch_size == (noted or micro_batch)
    # On other machines it may fit.
    assert attempt_notes.read(str(tmp_path), halves_on="b").applied(plan) is plan


def test_the_plan_keeps_its_global_batch(tmp_path):
    from flytune.planning import planner
    from flytune.recipe import Recipe
    from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

    changes = {"training.global_batch_size": 12, "hardware.shape": "cpu-2", "sharding": "ddp"}
    recipe = tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 16), changes)
    plan = planner.make(Recipe.model_validate(recipe))
    smaller = Notes(per_device_train_batch_size=2).applied(plan)
    assert (plan.per_device_train_batch_size, plan.gradient_accumulation_steps) == (6, 1)
    assert (smaller.per_device_train_batch_size, smaller.gradient_accumulation_steps) == (2, 3)
    assert Notes().applied(plan) is plan
    assert Notes(per_device_train_batch_size=8).applied(plan) is plan


def test_tasks_of_one_process_raise_temporary_failures_as_recoverable(monkeypatch):
    from flytekit.exceptions.user import FlyteRecoverableException

    from tasks.runtime.retries import classified

    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "1")
    with (
        pytest.raises(
            FlyteRecoverableException, match="(?s)^hub busy: .*503.*recoverable: attempt 2 of 4"
        ) as caught,
        classified(),
    ):
        hub_answers(503)
    assert caught.value.__cause__ is not None
    with pytest.raises(DataError, match="^no EOS$"), classified():
        raise DataError("no EOS")
