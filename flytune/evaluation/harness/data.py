"""What the harness's tasks need, before anything is trained; their data is kept for pods that see no hub."""

from pathlib import Path

from flytune.data.tokenizer import load_tokenizer, require_chat_template
from flytune.errors import RecipeError
from flytune.evaluation import guards
from flytune.evaluation.harness import tasks
from flytune.recipe.recipe import Recipe


def keep(recipe: Recipe, folder: Path | None) -> None:
    """Loads each task here, where the hub may be asked, so that `folder` has its data for pods that may not.

    None keeps it in this machine's own cache.

    Raises:
        RecipeError: a task cannot be loaded; a guard can never hold, for the tasks measure no such thing.
        DataError: evaluation.apply_chat_template, and the model has none.
    """
    if recipe.evaluation.tasks and recipe.evaluation.apply_chat_template:
        require_chat_template(load_tokenizer(recipe.model, recipe.data), recipe.model, "of evaluation.apply_chat_template")
    measured: dict[str, list[str] | None] = {}
    with tasks.data_in(folder):
        for task in recipe.evaluation.tasks:
            with tasks.quiet(f"{task.name}: data"):
                loaded = tasks.load(recipe, task)
            for name, one in loaded["tasks"].items():
                # A metric that is a function of the task's own may give others than its name says.
                own = any(callable(metric["metric"]) for metric in one.get_config("metric_list") or [])
                measured[name] = None if own else list(one.aggregation())
            for name, group in loaded["groups"].items():
                measured[name] = [metric.metric for metric in group.aggregate_metric_list or []]
    if problems := guards.never_measured(recipe, measured):
        raise RecipeError.of(f"recipe {recipe.name}", problems)
