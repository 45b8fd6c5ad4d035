"""Flyte 2 as the orchestrator of stages: what one action needs of it, as a value that ranks and workers
get."""

import hashlib
import os
import shutil
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import flyte

from flytune.pods import spec
from flytune.storage import Storage

_TRANSFERS = 8
"""Files of a folder that are copied at a time."""


@dataclass(frozen=True)
class Flyte2:
    """One action of a run, as its stage knows it."""

    raw: str
    """Address below which the attempt stores its data; empty in a local run."""
    base: str = ""
    """Address of the run. `raw` is no help to find others: its first folder is another one for each
    action."""
    scope: tuple[str, ...] = ()
    """Names of organization, project, domain and run, which are parts of `base`."""
    run: str = ""
    action: str = ""

    def fetch(self, address: str, target: Path, is_folder: bool = False) -> None:
        stored = Storage(address, "")
        if not is_folder:
            if not stored.exists():
                raise FileNotFoundError(address)
            stored.download("", target)
            return
        names = stored.sizes("")
        if not names:
            raise FileNotFoundError(address)
        with ThreadPoolExecutor(_TRANSFERS) as pool:
            list(pool.map(lambda name: stored.download(name, target / name), names))

    def store(self, path: Path, address: str) -> str:
        if "://" not in address:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, address)
            return address
        stored = Storage(address, "")
        files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
        with ThreadPoolExecutor(_TRANSFERS) as pool:
            list(
                pool.map(
                    lambda file: stored.copy(file, file.relative_to(path).as_posix() if file != path else ""),
                    files,
                )
            )
        return address

    def new_address(self) -> str:
        # Not by Python's generator, which training seeds.
        return f"{self.raw.rstrip('/')}/{uuid.uuid4().hex}" if self.raw else str(self.new_folder() / "stored")

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="flytune-"))

    def shared_address(self, name: str) -> str | None:
        """Return an address that all attempts and executions share; None on this machine.

        It is what the addresses of all runs begin with: the parts before organization, project, domain and
        run.
        """
        if self.is_local():
            return None
        scheme, _, path = self.base.partition("://")
        bucket, *parts = path.rstrip("/").split("/")
        start = next((at for at, part in enumerate(parts) if part in self.scope), len(parts))
        return f"{scheme}://{'/'.join([bucket, *parts[:start]])}/flytune-{name}"

    def execution(self) -> str:
        """Return the name of the run; empty on this machine."""
        return self.run

    def attempts_address(self) -> str | None:
        """Return the address of the records that all attempts of this action share; None on this machine."""
        root = self.shared_address("phases")
        return (
            None
            if root is None
            else f"{root}/{self.run}/{hashlib.sha256(self.action.encode()).hexdigest()[:16]}"
        )

    def is_local(self) -> bool:
        return not self.raw

    def runs_on_declared_rows(self) -> bool:
        """Return True."""
        return True


def current() -> Flyte2:
    """Return the action that this process runs."""
    context = flyte.ctx()
    action = context.action
    if context.mode == "local" or action is None:
        return Flyte2("")
    # By them records of attempts and texts of failures name the run, on both faces.
    os.environ.setdefault(spec.EXECUTION, action.run_name or "")
    os.environ.setdefault(spec.ACTION, action.name or "")
    scope = tuple(name for name in (action.org, action.project, action.domain, action.run_name) if name)
    return Flyte2(context.raw_data_path.path, context.run_base_dir, scope, action.run_name or "", action.name)
