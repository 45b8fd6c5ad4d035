"""The interface of an experiment tracker."""

from pathlib import Path
from types import ModuleType
from typing import ClassVar


class Tracker:
    """One tracker, to which transformers' callback of the same name reports. Subclasses contain only what
    differs."""

    name: ClassVar[str]
    """Value in `tracking.report_to`; the callback's and the package's name too."""
    requirement: ClassVar[str]
    """Requirement that pip installs it with."""

    def variables(self, project: str, checkpoints: Path) -> dict[str, str]:
        """Return the environment variables by which its callback knows the project, or the place of its
        files."""
        return {}

    def access_problem(self, project: str) -> str | None:
        """Return why this process cannot report to it, and what to do; None if it can. Only the first process
        asks."""
        return None

    def run_id(self, library: ModuleType) -> str | None:
        """Return the id of the run that this process reports to, of its loaded library; None without one."""
        return None

    def resume_variables(self, run_id: str) -> dict[str, str]:
        """Return the environment variables by which its callback resumes a run."""
        return {}

    def close(self) -> None:
        """Close a run that transformers leaves open, which a next run of this process would otherwise
        continue."""
