"""Sharded checkpoints written beside training: it stops for the copy to host memory, not for the disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from flytune.errors import StorageError


class Beside:
    """On each process; all save at the same time."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        """One for each save of a checkpoint (model, optimizer): their threads must not meet in the same collective."""
        self._writing: list[Any] = []

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within it, torch.distributed.checkpoint.save copies what it is given, and a thread writes the copy."""
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import BlockingAsyncStager
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self._writing = []

        def save(state_dict: Any, *, storage_writer: Any = None, planner: Any = None) -> None:
            number = len(self._writing)
            if number == len(self._groups):
                self._groups.append(torch.distributed.new_group(backend="gloo"))
            where = {"storage_writer": storage_writer, "planner": planner, "process_group": self._groups[number]}
            self._writing.append(async_save(state_dict, async_stager=BlockingAsyncStager(), **where))

        with mock.patch.object(dcp, "save", save):  # accelerate asks the module for it at each save
            yield

    def wait(self) -> None:
        """Until all that was begun is written, by all processes.

        Raises:
            StorageError: what has failed, on whichever process.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            for future in self._writing:
                future.result()
        except CheckpointException as error:
            # It is no Exception; what any process has failed of stands in it.
            cause = next((one for one, _ in error.failures.values()), error)
            raise StorageError(f"the checkpoint could not be written: {cause}") from error
