"""Checkpoints that are written asynchronously: they hold the state of the moment at which they were saved."""

import threading

import torch

from flytune.errors import StorageError
from flytune.training.checkpoints.saver import AsyncSave
from tests.support import ranks
from tests.support.waiting import LIMIT


def shards():
    """Return a tensor of which each of two ranks has a half."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo")
    return distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])


def save_and_train_on(folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import filesystem

    write, weights, async_save = filesystem.FileSystemWriter.write_data, shards(), AsyncSave()

    looked = threading.Event()

    def slow(self, *arguments):
        assert looked.wait(LIMIT)
        return write(self, *arguments)

    filesystem.FileSystemWriter.write_data = slow
    with async_save.saving():
        for name in ("model", "optimizer"):
            dcp.save({"weights": weights}, storage_writer=dcp.FileSystemWriter(folder / name))
    was_written = [(folder / name / ".metadata").exists() for name in ("model", "optimizer")]
    looked.set()
    # Training continues: the weights change, and ranks meet.
    weights.to_local().add_(100.0)
    torch.distributed.all_reduce(torch.ones(1))
    async_save.wait()
    found = []
    for name in ("model", "optimizer"):
        read = torch.distributed.tensor.zeros(
            8, device_mesh=weights.device_mesh, placements=weights.placements
        )
        dcp.load({"weights": read}, storage_reader=dcp.FileSystemReader(folder / name))
        found.append(read.full_tensor().tolist())
    return was_written, found


def test_the_written_checkpoint_is_the_saved_state(tmp_path):
    was_written, found = ranks.run(2, save_and_train_on, tmp_path)
    assert was_written == [False, False]
    assert found == [list(map(float, range(8)))] * 2


def save_below_a_file(folder):
    import torch.distributed.checkpoint as dcp

    weights, async_save = shards(), AsyncSave()
    with async_save.saving():
        dcp.save({"weights": weights}, storage_writer=dcp.FileSystemWriter(folder / "file" / "model"))
    try:
        async_save.wait()
    except StorageError as error:
        return str(error)
    return "saved"


def test_a_write_that_fails_is_reported(tmp_path):
    (tmp_path / "file").write_text("in the way")
    said = ranks.run(2, save_below_a_file, tmp_path)
    assert "the checkpoint could not be written: [Errno 20] Not a directory" in said
