"""The evaluation tasks that a recipe names (evaluation.tasks), a section for each kind."""

from typing import Annotated, ClassVar

from pydantic import Field

from flytune import limits
from flytune.schema import Positive, Strict


class TaskSection(Strict):
    """A task on base and tuned model; flytune/evaluation has a module for each kind."""

    module: ClassVar[str]
    """Name of that module. A further kind has a required field `kind`, by which a recipe says that it means
    this one."""
    name: Annotated[str, Field(min_length=1)]


class HarnessTask(TaskSection):
    """A task or group of lm-evaluation-harness."""

    module = "harness"
    num_fewshot: Annotated[int, Field(ge=0, le=limits.LISTED)] | None = None
    """Number of few-shot examples; by default the task's own."""
    limit: Positive | None = None
    """Largest number of documents of each task."""


EvaluationTask = HarnessTask
"""All kinds of tasks, a union where there are several."""
