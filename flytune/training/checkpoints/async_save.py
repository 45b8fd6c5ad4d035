"""Asynchronous writing of sharded checkpoints: training waits for the copy to host memory, and not for the
disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flytune import patches
from flytune.errors import StorageFull


class AsyncSave:
    """Asynchronous writes of one process; all processes save at the same time."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        """Process groups, one for each save of a checkpoint (model, optimizer): their threads must not meet
        in a collective."""
        self._writing: list[Any] = []

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Make torch.distributed.checkpoint.save copy its arguments, and a thread write the copy."""
        import torch
        from torch.distributed.checkpoint.staging import BlockingAsyncStager
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self._writing = []

        def save(state_dict: Any, *, storage_writer: Any = None, planner: Any = None) -> None:
            number = len(self._writing)
            if number == len(self._groups):
                self._groups.append(torch.distributed.new_group(backend="gloo"))
            where = {
                "storage_writer": storage_writer,
                "planner": planner,
                "process_group": self._groups[number],
            }
            self._writing.append(async_save(state_dict, async_stager=BlockingAsyncStager(), **where))

        with patches.torch.CHECKPOINT_SAVE.replaced(
            save
        ):  # accelerate looks it up in the module at each save
            yield

    def wait(self) -> None:
        """Wait until all processes have written what was saved.

        Raises:
            StorageError: a write failed, on any process.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            for future in self._writing:
                future.result()
        except CheckpointException as error:
            # It is not an Exception; it contains the errors of all processes.
            cause = next((one for one, _ in error.failures.values()), error)
            raise StorageFull(f"the checkpoint could not be written: {cause}") from error
