"""The console's text of a failed task: one sentence, what to do, where the log is; the traceback last."""

import os
import traceback
from pathlib import Path

from flytekit.bin import entrypoint
from flytekit.exceptions.user import FlyteUserRuntimeException

from flytune.failures import reports
from flytune.failures.text import FailureText, task_name

LONGEST = 16_000
"""Most characters; flytepropeller leaves the middle of longer ones out than it is configured to keep (2,048 and more)."""
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def log_lines() -> tuple[str, ...]:
    """Say where the log of this pod is; nothing outside of a pod."""
    if "FLYTE_INTERNAL_EXECUTION_ID" not in os.environ:
        return ()
    pod = os.environ.get("HOSTNAME", "")
    by_default = "-".join(os.environ.get(f"FLYTE_INTERNAL_EXECUTION_{part}", "") for part in ("PROJECT", "DOMAIN"))
    namespace = _NAMESPACE.read_text(encoding="ascii").strip() if _NAMESPACE.exists() else by_default
    lines = [f"log: kubectl logs --namespace {namespace} {pod}"] if pod else []
    if address := os.environ.get("FLYTE_EXECUTION_URL"):
        lines.append(f"console: {address}")
    return tuple(lines)


def described(error: BaseException) -> FailureText:
    """Return what a task has failed with, as RunFailed has it or as the table of failures does."""
    shown: BaseException | None = error
    text = getattr(error, "text", None)
    # A SyntaxError has a `text` too.
    if not isinstance(text, FailureText):
        failure = reports.of_error(error, rank=0)
        text = FailureText(failure.sentence, failure.advice, task_name(), log_lines())
    else:
        # Not the error itself: what it says is reported, and one that judges others has a traceback that says nothing.
        shown = error.__cause__
    trace = "".join(traceback.format_exception(shown)) if shown else ""
    return text._replace(details=text.details or trace)


def install() -> None:
    """Make flytekit write errors so, in pods: its own begin with the traceback, and there is no other place to say it."""

    def written(error: Exception) -> str:
        value = error.value if isinstance(error, FlyteUserRuntimeException) else error
        return described(value).within(LONGEST)

    entrypoint.get_traceback_str = written
