"""Attempts of a task: what the error of a failed one says, and the notes from which the next one knows how it ended."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flytune.failures import Failure, FailureText, task_name
from flytune.failures.table import RETRIES
from flytune.pods import spec
from flytune.training import PhaseNotes, earlier_attempts, phase_notes


def text_of(failure: Failure, is_alone: bool = False, task: str = "", here: str = "") -> FailureText:
    """Return the text of a failed attempt.

    Args:
        is_alone: True to leave the rank out.
        task: name of the task, where the pod's command does not have it.
        here: what follows a recoverable failure in a local run.
    """
    rank = "" if is_alone else f"rank {failure.rank}: "
    outcome = _next_attempt(here) if failure.recoverable else "the run does not go on by itself"
    lines = (outcome, *_earlier_attempts(), *log_lines())
    return FailureText(f"{rank}{failure.sentence}", failure.advice, task or task_name(), lines, failure.details)


def retries() -> int:
    """Return the number of attempts after the first that the task of this pod has."""
    return int(os.environ.get(spec.RETRIES, RETRIES))


def log_lines() -> tuple[str, ...]:
    """Return lines with the addresses of this pod's log and console page; none outside a pod."""
    if "FLYTE_INTERNAL_EXECUTION_ID" not in os.environ:
        return ()
    pod = os.environ.get("HOSTNAME", "")
    by_default = "-".join(os.environ.get(f"FLYTE_INTERNAL_EXECUTION_{part}", "") for part in ("PROJECT", "DOMAIN"))
    namespace = os.environ.get(spec.NAMESPACE) or by_default
    lines = [f"log: kubectl logs --namespace {namespace} {pod}"] if pod else []
    if address := os.environ.get("FLYTE_EXECUTION_URL"):
        lines.append(f"console: {address}")
    return tuple(lines)


def _earlier_attempts() -> list[str]:
    """Return a line on the end of each earlier attempt of this task, as far as their pods have left notes."""
    address, number = phase_notes.kept_at(), spec.attempts_before()
    execution = os.environ.get("FLYTE_INTERNAL_EXECUTION_ID", "")
    return earlier_attempts.lines(address, execution, before=number) if address and execution and number else []


def _next_attempt(here: str) -> str:
    if not (attempt := os.environ.get("FLYTE_ATTEMPT_NUMBER")):
        return here or "recoverable: on a cluster, Flyte starts another attempt; here, run it again"
    done, most = int(attempt) + 1, retries() + 1
    return f"recoverable: attempt {done} of {most}; " + ("Flyte starts another" if done < most else "none is left")


@contextmanager
def record_phase(phase: str, address: str | None) -> Iterator[None]:
    """Write phase notes for a task of one process that loads a model; refuse a third attempt where two were killed.

    Args:
        address: where all attempts of the task keep their notes; None on this machine, where none are written.

    Raises:
        KilledAgain: two attempts were killed.
    """
    if address is None:
        yield
        return
    signals: list[int] = []
    notes = PhaseNotes(address, is_signalled=lambda: bool(signals))

    def end(number: int, frame: Any) -> None:
        """Record SIGTERM, so that an eviction is not taken for a kill; then end the process as before."""
        signals.append(number)
        notes.write_now()
        if callable(previous):
            previous(number, frame)
        else:
            # The signal itself does not end process 1 of a pod.
            os._exit(128 + number)

    with notes.attempt(phase=phase):
        previous = signal.signal(signal.SIGTERM, end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)
