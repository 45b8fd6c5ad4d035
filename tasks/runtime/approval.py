"""Question to a person on Flyte 1: a task that leaves one ends as a dynamic task, whose nodes ask, wait and
settle.

No node is there where nothing is asked, and the signal's name has the hash of the artifact, which only the
run knows.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from getpass import getuser
from importlib import import_module
from typing import Any

from flytekit import FlyteContextManager, WorkflowFailurePolicy, wait_for_input
from flytekit.core.context_manager import ExecutionState
from flytekit.core.workflow import PythonFunctionWorkflow, WorkflowMetadata, WorkflowMetadataDefaults
from flytekit.models.dynamic_job import DynamicJobSpec
from flytekit.models.task import TaskSpec
from flytekit.tools.translator import get_serializable
from flytekit.types.directory import FlyteDirectory

from flytune.recipe import Recipe
from flytune.registry import approval
from flytune.registry.approval import ApprovalQuestion
from flytune.stages.approval import take_answer
from flytune.stages.orchestrator import Folder
from tasks.runtime.orchestrator import FLYTE

_ASKS: ContextVar[bool] = ContextVar("asks", default=True)


@contextmanager
def without_questions() -> Iterator[None]:
    """Ask nobody in the block: an element of a map task cannot wait, and its artifact is approved later by a
    command."""
    token = _ASKS.set(False)
    try:
        yield
    finally:
        _ASKS.reset(token)


def asked(output: Any, recipe: Recipe, artifact: Folder) -> Any:
    """Return a stage's result, or the nodes that ask and settle where it has left a question beside its
    artifact.

    A run on this machine asks in the terminal.
    """
    question = approval.pending(artifact.address)
    if question is None:
        return output
    if not _ASKS.get():
        approval.show_command(artifact.address, recipe)
        return output
    if not FLYTE.is_local():
        return _job(question, recipe, artifact.address, isinstance(output, str))
    answer = approval.answer_here(question, artifact.address)
    if answer is None:
        return output
    settled = take_answer(
        FLYTE, lambda page: None, recipe, artifact, question.artifact_sha256, answer, getuser()
    )
    return settled.outcome if isinstance(output, str) else output


def _job(question: ApprovalQuestion, recipe: Recipe, address: str, is_promotion: bool) -> DynamicJobSpec:
    """Return the nodes that ask, wait for the signal, and settle; their output is the outcome, or else the
    artifact."""
    tasks = import_module("tasks.approval")  # which imports the declarations of tasks, and they this module
    report_failure = import_module("tasks.report").report_failure
    artifact = FlyteDirectory(address, remote_directory=False)
    execution = FLYTE.execution()
    how = (
        f"the node {question.name} of execution {execution} takes a text, `yes` or `no` with your name and "
        f'reasons, in the console or by FlyteRemote.set_input("{question.name}", "{execution}", ...) '
        "(docs/publish.md)"
    )

    def nodes(recipe: Any) -> Any:
        question_node = tasks.ask_person(recipe=recipe, artifact=artifact, how=how)
        answer = wait_for_input(question.name, timedelta(hours=question.hours), str)
        question_node >> answer
        return tasks.take_answer(
            recipe=recipe, artifact=artifact, sha256=question.artifact_sha256, answer=answer, by=""
        )

    def outcome(recipe: Recipe) -> str:
        text: str = nodes(recipe).outcome
        return text

    def stored() -> FlyteDirectory:
        artifact: FlyteDirectory = nodes(recipe).artifact
        return artifact

    def promoted() -> str:
        # The workflow of a refresh has no failure node, which tells where the model is when nobody answers.
        text: str = _workflow(outcome, report_failure)(recipe=recipe)
        return text

    return _compiled(promoted if is_promotion else stored)


def _workflow(function: Any, on_failure: Any = None) -> PythonFunctionWorkflow:
    metadata = WorkflowMetadata(on_failure=WorkflowFailurePolicy.FAIL_IMMEDIATELY)
    return PythonFunctionWorkflow(
        function, metadata, WorkflowMetadataDefaults(interruptible=False), on_failure=on_failure
    )


def _compiled(function: Any) -> DynamicJobSpec:
    """Return a workflow as the job of a dynamic task, as PythonFunctionTask.compile_into_workflow makes
    it."""
    context = FlyteContextManager.current_context()
    state = context.new_execution_state().with_params(mode=ExecutionState.Mode.DYNAMIC_TASK_EXECUTION)
    compiling = context.with_compilation_state(
        context.new_compilation_state(prefix="d")
    ).with_execution_state(state)
    with FlyteContextManager.with_context(compiling) as inner:
        entities: OrderedDict[Any, Any] = OrderedDict()
        workflow = _workflow(function)
        workflow.compile()
        spec: Any = get_serializable(entities, inner.serialization_settings, workflow)
        return DynamicJobSpec(
            tasks=[entity.template for entity in entities.values() if isinstance(entity, TaskSpec)],
            nodes=spec.template.nodes,
            min_successes=len(spec.template.nodes),
            outputs=spec.template.outputs,
            subworkflows=spec.sub_workflows,
        )
