"""approval.jsonl: the question whether an artifact may be published or accepted, and the answers, a line
each.

The file is in the artifact's folder and not one of its files: an answer does not change what is approved.
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from flytune.schema import Record

APPROVAL = "approval.jsonl"
PAGE = "approval.html"
"""Page that a person is to look at before the answer: the artifact's report, below the question."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ApprovalAnswer(Record):
    """Answer to the question about one artifact."""

    artifact_sha256: Sha256
    """Hash of the artifact's artifact.json, which lists the hash of every file."""
    time: datetime
    answer: Literal["yes", "no"]
    words: str
    """The answer as it was given, with the name and the reasons that it has."""
    by: str = ""
    """Name of the person as far as the platform knows it; both Flytes keep none."""

    def describe(self) -> str:
        """Return the answer in one line."""
        by = f" by {self.by}" if self.by else ""
        verb = "approved" if self.answer == "yes" else "not approved"
        return (
            f"{verb}{by} at {self.time:%Y-%m-%d %H:%M} UTC: {self.words!r}, artifact "
            f"{self.artifact_sha256[:12]}"
        )
