"""The result of one check of the data contract."""

from typing import Literal

from flytune.schema import Strict

Verdict = Literal["ok", "warning", "stop"]


class Check(Strict):
    """The result of one check."""

    name: str
    verdict: Verdict
    count: int
    """Number of faults that `found` describes; for shares, the part of `of`."""
    of: int
    found: str
    """Result with its counts, as a sentence."""
    limit: str
    """Condition that stops the run."""
    example: str = ""
    """Location of the first fault, and an excerpt."""
    advice: str = ""
    """Action to take; empty if none is needed."""

    @property
    def share(self) -> float:
        return self.count / self.of if self.of else 0.0

    @property
    def sentence(self) -> str:
        """Return the fault and what to do, without the example."""
        return f"{self.name}: {self.found}; {self.advice}"

    def __str__(self) -> str:
        example = f" ({self.example})" if self.example else ""
        return f"{self.name}: {self.found}{example}; {self.advice}"


def judged(
    name: str,
    count: int,
    of: int,
    sentence: str,
    limit: str,
    *,
    stops: bool = False,
    is_fine: bool | None = None,
    fine: str = "",
    advice: str,
    example: str = "",
) -> Check:
    """Return the result of a check, which passes if `is_fine`; by default, if `count` is 0."""
    fault = stops or not (count == 0 if is_fine is None else is_fine)
    verdict: Verdict = "warning" if fault else "ok"
    if stops:
        verdict = "stop"
    text = sentence if fault or not fine else fine
    return Check(
        name=name,
        verdict=verdict,
        count=count,
        of=of,
        found=text,
        limit=limit,
        example=example if fault else "",
        advice=advice if fault else "",
    )
