"""Data of the harness's tasks: checked and downloaded before training, for pods without access to a hub."""

from pathlib import Path

from flytune.data import load_tokenizer, require_chat_template
from flytune.errors import RecipeError
from flytune.evaluation import guards
from flytune.evaluation.harness import tasks
from flytune.recipe import Recipe


def download(recipe: Recipe, folder: Path | None) -> None:
    """Load each task and store its data in `folder`, or in this machine's own cache if `folder` is None.

    Raises:
        RecipeError: a task cannot be loaded; or a guard names a metric that the tasks do not measure.
        DataError: evaluation.apply_chat_template is set, and the model has no chat template.
    """
    if recipe.evaluation.tasks and recipe.evaluation.apply_chat_template:
        require_chat_template(load_tokenizer(recipe.model, recipe.data), recipe.model, "of evaluation.apply_chat_template")
    measured: dict[str, list[str] | None] = {}
    with tasks.data_in(folder if recipe.evaluation.tasks else None):
        for task in recipe.evaluation.tasks:
            with tasks.quiet(f"{task.name}: data"):
                loaded = tasks.load(recipe, task)
            for name, one in loaded["tasks"].items():
                # A metric that is the task's own function may return metrics of other names.
                own = any(callable(metric["metric"]) for metric in one.get_config("metric_list") or [])
                measured[name] = None if own else list(one.aggregation())
            for name, group in loaded["groups"].items():
                measured[name] = [metric.metric for metric in group.aggregate_metric_list or []]
    if problems := guards.never_measured(recipe, measured):
        raise RecipeError.of(f"recipe {recipe.name}", problems)
