"""Question to a person on Flyte 2: a condition, whose name has the hash of the artifact; in a local run, the
terminal."""

import asyncio
from datetime import timedelta
from getpass import getuser
from typing import Any

import flyte
from flyte._internal.controllers import get_controller
from flyte.errors import ConditionTimedoutError
from flyte.io import Dir

from flyte2.runtime.file_systems import fsspec_s_own
from flyte2.runtime.orchestrator import current
from flyte2.stages import call
from flytune.recipe import Recipe
from flytune.registry import approval
from flytune.registry.approval import ApprovalQuestion
from flytune.stages.table import ANSWER, ASK


async def outcome(recipe: Recipe, artifact: Dir) -> str | None:
    """Ask the question that the stage before has stored beside an artifact; return what the answer led to.

    Returns: None if there is no question, or nobody can be asked here.
    """
    with fsspec_s_own():
        question = approval.pending(artifact.path)
    if question is None:
        return None
    if current().is_local():
        answer = await asyncio.to_thread(approval.answer_here, question, artifact.path)
        by = getuser()
    else:
        answer = await _signaled(question, recipe, artifact)
        by = ""
    if answer is None:
        return None
    _, settled = await call(ANSWER)(
        recipe=recipe, artifact=artifact, sha256=question.artifact_sha256, answer=answer, by=by
    )
    return str(settled)


async def _signaled(question: ApprovalQuestion, recipe: Recipe, artifact: Dir) -> str:
    """Return the answer that the condition gets, or the question's own one after a timeout."""
    condition: Any = await flyte.new_condition.aio(
        question.name,
        prompt=approval.text(question, artifact.path, "yes or no, with your name and reasons"),
        data_type=str,
        timeout=timedelta(hours=question.hours),
    )
    # The open backend's lists leave the names of conditions out: a person names the action.
    controller: Any = get_controller()
    action = controller._pending_conditions[question.name].name
    how = f"flyte signal condition {current().run} {action} 'yes, YOUR NAME' (or 'no, YOUR NAME: REASON')"
    await call(ASK)(recipe=recipe, artifact=artifact, how=how)
    try:
        return str(await condition.wait.aio())
    except ConditionTimedoutError:
        return question.timeout
