"""Stand-ins for train tasks that take seconds: ranks, rendezvous, collectives and an upload, for
test_job_life.py."""

import os
import time
from pathlib import Path
from unittest import mock

import images
from flytune.hardware import Shape
from flytune.stages.orchestrator import Folder, Orchestrator
from flytune.stages.table import Stage
from tasks.runtime.face import on_shape
from tasks.runtime.ranks import of_shape
from tests.support.propeller import IMAGES

COMMON = {
    "accelerator": "cpu",
    "cpu": 1,
    "memory_gib": 6,
    "disk_gib": 20,
    "shared_memory_gib": 1,
    "price_per_hour": 0.0,
}


def work(orchestrator: Orchestrator, size: int, steps: int, fault: str = "") -> Folder:
    """Run steps, then write a file of `size` bytes on rank 0. `fault` strikes in attempt 0:
    "FAULT RANK STEP", or "stay RANK export".
    """
    import torch

    out = orchestrator.new_folder() / "result"
    say("training begins")
    rank, is_alone = int(os.environ.get("RANK", "0")), "RANK" not in os.environ
    if not is_alone:
        torch.distributed.init_process_group("gloo")
    for step in range(steps):
        strike(fault, rank, step)
        if not is_alone:
            torch.distributed.all_reduce(torch.ones(1))
        say(f"step {step}")
    say("export begins")
    strike(fault, rank, "export")
    out.mkdir()
    if rank == 0:
        Path(out, "model.safetensors").write_bytes(os.urandom(size))
    if not is_alone:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return Folder.here(out)


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def strike(fault: str, rank: int, where: int | str) -> None:
    if fault.split()[1:] != [str(rank), str(where)] or os.environ["FLYTE_ATTEMPT_NUMBER"] != "0":
        return
    if fault.startswith("stay"):
        time.sleep(600)  # until the test ends the pod
    if fault.startswith("kill"):
        os.kill(os.getpid(), 9)
    raise KeyError("a bug")


def _shape(name: str, nodes: int, processes: int) -> Shape:
    return Shape.model_validate(COMMON | {"name": name, "nodes": nodes, "processes": processes})


QUICK = {}
with mock.patch.object(images, "TRAIN", IMAGES["train"]):
    for _name, _nodes, _processes in (("cpu-1x2", 2, 1), ("cpu-2", 1, 2), ("cpu-1", 1, 1)):
        _row = _shape(_name, _nodes, _processes)
        _ranks = _processes if _row.world_size > 1 else 0
        _job = Stage("work", "", "shape"), work, globals(), f"work_{_row.identifier}", _row, _ranks
        QUICK[_name] = on_shape(*_job, of_shape)
