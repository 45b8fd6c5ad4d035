"""Text of a failed task in Flyte's console: one sentence, advice, the log's address; the traceback last."""

import sys
import traceback
from pathlib import Path

from flytekit.exceptions.user import FlyteUserRuntimeException

from flytune import patches
from flytune.failures import FailureText, reports, task_name
from flytune.stages import attempts
from flytune.training import attempt
from tasks.runtime.orchestrator import attempts_address

LONGEST = 16_000
"""Most characters of a text. flytepropeller cuts the middle out of texts longer than its limit (2,048 or
more)."""


def is_pod() -> bool:
    """Return whether Flyte's entry point of pods has started this process."""
    return Path(sys.argv[0]).name.startswith("pyflyte-") and "execute" in Path(sys.argv[0]).name


def failure_text(error: BaseException) -> FailureText:
    """Return the text of a task's error: its own where it has one (RunFailed), else from the table of
    failures, which is recorded."""
    shown: BaseException | None = error
    text = getattr(error, "text", None)
    # A SyntaxError has a `text` too.
    if not isinstance(text, FailureText):
        failure = reports.of_error(error, rank=0)
        text = FailureText(failure.sentence, failure.advice, task_name(), attempts.log_lines())
        # The report of the run reads it there: Flyte's message of it has the words of other layers around it.
        attempt.record_failure(text, failure.kind, attempts_address())
    else:
        # The traceback of its cause: that of RunFailed itself shows only where failures are classified.
        shown = error.__cause__
    trace = "".join(traceback.format_exception(shown)) if shown else ""
    return text._replace(details=text.details or trace)


def install() -> None:
    """Replace flytekit's function that writes errors in pods, whose text begins with the traceback; there is
    no hook."""

    def written(error: Exception) -> str:
        value = error.value if isinstance(error, FlyteUserRuntimeException) else error
        return failure_text(value).within(LONGEST)

    patches.flytekit.TRACEBACK.install(written)
