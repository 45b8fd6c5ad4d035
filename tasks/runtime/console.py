"""Text of a failed task in Flyte's console: one sentence, advice, the log's address; the traceback last."""

import os
import traceback
from pathlib import Path

from flytekit.bin import entrypoint
from flytekit.exceptions.user import FlyteUserRuntimeException

from flytune.failures import FailureText, reports, task_name

LONGEST = 16_000
"""Most characters of a text. flytepropeller cuts the middle out of texts longer than its limit (2,048 or more)."""
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def log_lines() -> tuple[str, ...]:
    """Return lines with the addresses of this pod's log and console page; none outside a pod."""
    if "FLYTE_INTERNAL_EXECUTION_ID" not in os.environ:
        return ()
    pod = os.environ.get("HOSTNAME", "")
    by_default = "-".join(os.environ.get(f"FLYTE_INTERNAL_EXECUTION_{part}", "") for part in ("PROJECT", "DOMAIN"))
    namespace = _NAMESPACE.read_text(encoding="ascii").strip() if _NAMESPACE.exists() else by_default
    lines = [f"log: kubectl logs --namespace {namespace} {pod}"] if pod else []
    if address := os.environ.get("FLYTE_EXECUTION_URL"):
        lines.append(f"console: {address}")
    return tuple(lines)


def failure_text(error: BaseException) -> FailureText:
    """Return the text of a task's error: its own where it has one (RunFailed), else from the table of failures."""
    shown: BaseException | None = error
    text = getattr(error, "text", None)
    # A SyntaxError has a `text` too.
    if not isinstance(text, FailureText):
        failure = reports.of_error(error, rank=0)
        text = FailureText(failure.sentence, failure.advice, task_name(), log_lines())
    else:
        # The traceback of its cause: that of RunFailed itself shows only where failures are classified.
        shown = error.__cause__
    trace = "".join(traceback.format_exception(shown)) if shown else ""
    return text._replace(details=text.details or trace)


def install() -> None:
    """Replace flytekit's function that writes errors in pods, whose text begins with the traceback; there is no hook."""

    def written(error: Exception) -> str:
        value = error.value if isinstance(error, FlyteUserRuntimeException) else error
        return failure_text(value).within(LONGEST)

    entrypoint.get_traceback_str = written
