"""Attempts of a task: what the error of a failed one says, and the record from which the next one knows how
it ended."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flytune.failures import Failure, FailureText, task_name
from flytune.failures.messages import parse_message
from flytune.failures.table import RETRIES
from flytune.pods import spec
from flytune.stages.orchestrator import Failed
from flytune.training import AttemptWriter, attempt

_texts: list[FailureText] = []
"""Texts of the failures of this process."""


def text_of(
    failure: Failure, is_alone: bool = False, task: str = "", here: str = "", address: str | None = None
) -> FailureText:
    """Return the text of a failed attempt, and record it.

    Args:
        is_alone: True to leave the rank out.
        task: name of the task, where the pod's command does not have it.
        here: what follows a recoverable failure in a local run.
        address: where the task's attempts keep their records; None on this machine.
    """
    rank = "" if is_alone else f"rank {failure.rank}: "
    outcome = _next_attempt(here) if failure.recoverable else "the run does not go on by itself"
    lines = (outcome, *attempt.earlier_lines(), *log_lines())
    text = FailureText(
        f"{rank}{failure.sentence}", failure.advice, task or task_name(), lines, failure.details
    )
    attempt.record_failure(text, failure.kind, address)
    _texts.append(text)
    return text


def failed(message: str, node: str = "") -> Failed:
    """Return the failure of which a message of Flyte tells: in the words of this process, or else as the
    message has it."""
    texts = [text for text in _texts if text.is_in(message)]
    return Failed(texts[-1] if texts else parse_message(message), node, message)


def retries() -> int:
    """Return the number of attempts after the first that the task of this pod has."""
    return int(os.environ.get(spec.RETRIES, RETRIES))


def log_lines() -> tuple[str, ...]:
    """Return lines with the addresses of this pod's log and console page; none outside a pod."""
    if spec.EXECUTION not in os.environ:
        return ()
    pod = os.environ.get("HOSTNAME", "")
    by_default = "-".join(
        os.environ.get(f"FLYTE_INTERNAL_EXECUTION_{part}", "") for part in ("PROJECT", "DOMAIN")
    )
    namespace = os.environ.get(spec.NAMESPACE) or by_default
    lines = [f"log: kubectl logs --namespace {namespace} {pod}"] if pod else []
    if address := os.environ.get("FLYTE_EXECUTION_URL"):
        lines.append(f"console: {address}")
    return tuple(lines)


def _next_attempt(here: str) -> str:
    if not (number := os.environ.get("FLYTE_ATTEMPT_NUMBER")):
        return here or "recoverable: on a cluster, Flyte starts another attempt; here, run it again"
    others = attempt.of_other_actions()
    done, most = others + int(number) + 1, others + retries() + 1
    return f"recoverable: attempt {done} of {most}; " + (
        "Flyte starts another" if done < most else "none is left"
    )


@contextmanager
def record_phase(phase: str, address: str | None) -> Iterator[None]:
    """Keep the record of a task of one process that loads a model; refuse a third attempt where two were
    killed.

    Args:
        address: where all attempts of the task keep their records; None on this machine, where none are
            written.

    Raises:
        KilledAgain: two attempts were killed.
    """
    if address is None:
        yield
        return
    signals: list[int] = []
    writer = AttemptWriter(address, is_signalled=lambda: bool(signals))

    def end(number: int, frame: Any) -> None:
        """Record SIGTERM, so that an eviction is not taken for a kill; then end the process as before."""
        signals.append(number)
        writer.write_now()
        if callable(previous):
            previous(number, frame)
        else:
            # The signal itself does not end process 1 of a pod.
            os._exit(128 + number)

    with writer.keeping(phase=phase):
        previous = signal.signal(signal.SIGTERM, end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)
