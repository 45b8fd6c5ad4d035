"""Checkpoints that are written while training goes on: what was saved is what was there when it was saved."""

import time

import torch

from flytune.errors import StorageError
from flytune.training.checkpoints.async_save import Beside
from tests.support import ranks


def shards():
    """A tensor of which each of two ranks has a half."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo")
    return distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])


def save_and_train_on(folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import filesystem

    write, weights, beside = filesystem.FileSystemWriter.write_data, shards(), Beside()

    def slow(self, *arguments):
        time.sleep(1.0)
        return write(self, *arguments)

    filesystem.FileSystemWriter.write_data = slow
    with beside.saving():
        for name in ("model", "optimizer"):
            dcp.save({"weights": weights}, storage_writer=dcp.FileSystemWriter(folder / name))
    was_written = [(folder / name / ".metadata").exists() for name in ("model", "optimizer")]
    # Training goes on: the weights change, and ranks meet.
    weights.to_local().add_(100.0)
    torch.distributed.all_reduce(torch.ones(1))
    beside.wait()
    found = []
    for name in ("model", "optimizer"):
        read = torch.distributed.tensor.zeros(8, device_mesh=weights.device_mesh, placements=weights.placements)
        dcp.load({"weights": read}, storage_reader=dcp.FileSystemReader(folder / name))
        found.append(read.full_tensor().tolist())
    return was_written, found


def test_what_is_written_is_what_was_saved(tmp_path):
    was_written, found = ranks.run(2, save_and_train_on, tmp_path)
    assert was_written == [False, False]
    assert found == [list(map(float, range(8)))] * 2


def save_where_nothing_can_be(folder):
    import torch.distributed.checkpoint as dcp

    weights, beside = shards(), Beside()
    with beside.saving():
        dcp.save({"weights": weights}, storage_writer=dcp.FileSystemWriter(folder / "file" / "model"))
    try:
        beside.wait()
    except StorageError as error:
        return str(error)
    return "saved"


def test_a_write_that_fails_is_told(tmp_path):
    (tmp_path / "file").write_text("in the way")
    said = ranks.run(2, save_where_nothing_can_be, tmp_path)
    assert "the checkpoint could not be written: [Errno 20] Not a directory" in said
