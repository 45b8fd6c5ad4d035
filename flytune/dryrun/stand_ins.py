"""Stand-ins for what fake tensors lack: other processes, and masks that depend on values."""

from collections.abc import Iterator
from contextlib import contextmanager

from flytune import patches
from flytune.dryrun import passes
from flytune.dryrun.case import Case
from training_estimates.degrees import Degrees


@contextmanager
def fake_group(degrees: Degrees) -> Iterator[None]:
    """Start a process group in which this process is rank 0 and the others do not exist."""
    if degrees.world == 1:
        yield
        return
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=degrees.world)
    mesh = init_device_mesh("cpu", (degrees.data_parallel,))
    try:
        # A mesh reads its ranks, which a fake group does not have.
        with patches.torch.FSDP_MESH.replaced(lambda *_, **__: mesh):
            yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def masks(case: Case) -> Iterator[None]:
    """Give attention the masks that it gets in training: masks of fake tensors cannot depend on values."""
    if case.recipe.data.packing and not passes.is_flash(case):
        yield
    elif passes.is_flash(case):
        # It gets the borders of samples, and makes no mask of them.
        with patches.transformers.MASKS.replaced(lambda *_, **__: None):
            yield
    else:
        # Positions that count up are one sample.
        with patches.transformers.PACKED_SAMPLES.replaced(lambda *_, **__: None):
            yield
