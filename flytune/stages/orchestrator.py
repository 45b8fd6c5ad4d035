"""Primitives that a stage needs of its orchestrator, and the stored files and folders that it is given and
returns."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from flytune.failures import FailureText


@dataclass(frozen=True)
class Stored:
    """A stored file or folder."""

    address: str
    path: Path
    """Path on this node: of the original if it is here, else of the copy that `stored.local` makes."""

    @classmethod
    def here(cls, path: Path) -> Self:
        """Return a file or folder of this machine, which the orchestrator stores once the stage has returned
        it."""
        return cls(str(path), path)

    @property
    def is_here(self) -> bool:
        """True if the original is on this node."""
        return self.address == str(self.path)


class Folder(Stored):
    """A stored folder."""


class File(Stored):
    """A stored file."""


@dataclass(frozen=True)
class StoredRows(Stored):
    """Rows that another task has stored, with the name of their format."""

    format: str = "parquet"


@dataclass(frozen=True)
class Listed(Folder):
    """A stored folder with facts about it, for the orchestrator's catalog."""

    partitions: dict[str, str] = field(default_factory=dict)
    """Facts that it is found by."""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """Failure of a run, as its orchestrator reports it."""

    text: FailureText
    node: str = ""
    """Name of the failed node; empty if it is not known."""
    message: str = ""
    """Message of the orchestrator; empty if it has none."""


class Orchestrator(Protocol):
    """The system that runs stages and stores what they return."""

    def fetch(self, address: str, target: Path, is_folder: bool = False) -> None:
        """Copy a stored file or folder to a path.

        Raises:
            FileNotFoundError: there is none.
        """

    def store(self, path: Path, address: str) -> str:
        """Copy a file or folder to an address; return the address."""

    def new_address(self) -> str:
        """Return an address of this attempt's own where nothing is stored yet."""

    def new_folder(self) -> Path:
        """Create an empty folder in this attempt's working directory."""

    def shared_address(self, name: str) -> str | None:
        """Return an address that all attempts and executions share; None on this machine."""

    def execution(self) -> str:
        """Return the identifier of the execution; empty on this machine."""

    def is_local(self) -> bool:
        """Return True if outputs stay on this machine: a run without a cluster."""

    def runs_on_declared_rows(self) -> bool:
        """Return True if stages on shapes are tasks, which are declared for the rows of shapes.yaml."""


class Report(Protocol):
    """The page that a stage shows beside its result."""

    def __call__(self, html: str) -> None:
        """Show a page of HTML, in place of what was shown before."""
