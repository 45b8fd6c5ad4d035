"""Flyte as the orchestrator of stages: its storage, the folders of an attempt, and the addresses that
attempts share."""

import hashlib
import os
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from flytekit import FlyteContextManager, current_context
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.exceptions.user import FlyteDataNotFoundException

from flytune.pods import spec


class Flyte:
    """Flyte, as stages know their orchestrator."""

    def __reduce__(self) -> Any:
        """Pickle it for a rank in an interpreter of its own, which does not know where the attempt stores its
        data."""
        return _in_rank, (_files().raw_output_prefix,)

    def fetch(self, address: str, target: Path, is_folder: bool = False) -> None:
        try:
            _files().get_data(address, str(target), is_multipart=is_folder)
        except FlyteDataNotFoundException as error:
            raise FileNotFoundError(address) from error

    def store(self, path: Path, address: str) -> str:
        return str(_files().put_data(str(path), address, is_multipart=path.is_dir()))

    def new_address(self) -> str:
        # Not by flytekit's generator: forked ranks and their parent would draw the same name.
        return str(_files().join(_files().raw_output_prefix, uuid.uuid4().hex))

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="flytune-", dir=current_context().working_directory))

    def shared_address(self, name: str) -> str | None:
        """Return an address that all attempts and executions share; None on this machine.

        It is below the cluster's raw output location, next to the folders of attempts:
        LOCATION/SHARD/EXECUTION-NODE-ATTEMPT.
        """
        scheme, _, path = _files().raw_output_prefix.partition("://")
        if self.is_local():
            return None
        location = "/".join(path.rstrip("/").split("/")[:-2]) or path.partition("/")[0]
        return f"{scheme}://{location}/flytune-{name}"

    def execution(self) -> str:
        return os.environ.get(spec.EXECUTION, "")

    def is_local(self) -> bool:
        """Return True if tasks' outputs stay on this machine: a run without a cluster."""
        scheme, _, path = _files().raw_output_prefix.partition("://")
        return not path or scheme == "file"

    def runs_on_declared_rows(self) -> bool:
        """Return True."""
        return True


FLYTE = Flyte()


def _in_rank(raw_output_prefix: str) -> Flyte:
    files = FileAccessProvider(tempfile.mkdtemp(prefix="flytune-"), raw_output_prefix)
    context = FlyteContextManager.current_context().with_file_access(files)
    FlyteContextManager.push_context(context.build())
    return FLYTE


def _files() -> FileAccessProvider:
    return FlyteContextManager.current_context().file_access


def attempts_address() -> str | None:
    """Return the address of the records that all attempts of this task share; None on this machine."""
    root = FLYTE.shared_address("phases")
    if root is None:
        return None
    # All attempts of a node have the same address of inputs; elements of a map task have an index as well.
    inputs = dict(zip(sys.argv, sys.argv[1:], strict=False)).get("--inputs", "")
    index = os.environ.get(os.environ.get("BATCH_JOB_ARRAY_INDEX_VAR_NAME", ""), "")
    key = hashlib.sha256(f"{inputs} {index}".encode()).hexdigest()[:16]
    return f"{root}/{FLYTE.execution() or 'none'}/{key}"
